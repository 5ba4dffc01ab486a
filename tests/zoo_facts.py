"""What is known about each architecture, kept as data and checked by `test_zoo.py`.

A sweep leans on these: a layer that its model never calls cannot run in FP8, a tied parameter has
to stay tied, a repeated layer is quantised several times a step. `*` stands for any index.
"""

# Reasons why the stock model fails under `torch.autocast("cpu", torch.bfloat16)`.
STOCK_FAILS: dict[str, str] = {
    "deberta": "fills its FP32 attention scores with the minimum of FP32 through a BF16 tensor: "
    "'value cannot be converted to type c10::BFloat16 without overflow'",
}

# Linears whose forward no training step ever calls, with what the model does instead.
#   esm: only predict_contacts() calls it.      longformer: only with a global attention mask.
#   mobilebert: matmul with both weights.       layoutlmv3: weights used as lookup tables.
#   mamba, jamba: dt_proj.weight @ x.           wavlm: F.multi_head_attention_forward.
#   mask2former, siglip: the out_proj inside nn.MultiheadAttention.
BYPASSED: dict[str, tuple[str, ...]] = {
    "esm": ("esm.contact_head.regression",),
    "longformer": (
        "longformer.encoder.layer.*.attention.self.key_global",
        "longformer.encoder.layer.*.attention.self.query_global",
        "longformer.encoder.layer.*.attention.self.value_global",
    ),
    "mobilebert": ("cls.predictions.decoder", "cls.predictions.dense"),
    "layoutlmv3": (
        "layoutlmv3.encoder.rel_pos_bias",
        "layoutlmv3.encoder.rel_pos_x_bias",
        "layoutlmv3.encoder.rel_pos_y_bias",
    ),
    "mamba": ("backbone.layers.*.mixer.dt_proj",),
    "jamba": ("model.layers.*.mamba.dt_proj",),
    "mask2former": ("transformer_module.decoder.layers.*.cross_attn.out_proj",),
    "siglip": ("vision_model.head.attention.out_proj",),
    "wavlm": (
        "wavlm.encoder.layers.*.attention.k_proj",
        "wavlm.encoder.layers.*.attention.out_proj",
        "wavlm.encoder.layers.*.attention.q_proj",
        "wavlm.encoder.layers.*.attention.v_proj",
    ),
}

# Linears that one forward calls more than once.
REPEATED: dict[str, tuple[str, ...]] = {
    "albert": (
        "albert.encoder.albert_layer_groups.*.albert_layers.*.attention.dense",
        "albert.encoder.albert_layer_groups.*.albert_layers.*.attention.key",
        "albert.encoder.albert_layer_groups.*.albert_layers.*.attention.query",
        "albert.encoder.albert_layer_groups.*.albert_layers.*.attention.value",
        "albert.encoder.albert_layer_groups.*.albert_layers.*.ffn",
        "albert.encoder.albert_layer_groups.*.albert_layers.*.ffn_output",
    ),
    "deberta-v2": (
        "deberta.encoder.layer.*.attention.self.key_proj",
        "deberta.encoder.layer.*.attention.self.query_proj",
    ),
    "mask2former": ("transformer_module.decoder.mask_predictor.mask_embedder.*.0",),
}


def _same(names: str, *groups: str) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(names.split(), groups)


# Names of one Parameter, joined by ' = '. An architecture that is absent ties nothing.
TIES: dict[str, tuple[str, ...]] = {
    **_same(
        "bert big_bird",
        "bert.embeddings.word_embeddings.weight = cls.predictions.decoder.weight",
        "cls.predictions.bias = cls.predictions.decoder.bias",
    ),
    **_same(
        "roberta",
        "roberta.embeddings.word_embeddings.weight = lm_head.decoder.weight",
        "lm_head.bias = lm_head.decoder.bias",
    ),
    **_same(
        "xlm_roberta camembert",
        "lm_head.bias = lm_head.decoder.bias",
        "lm_head.decoder.weight = roberta.embeddings.word_embeddings.weight",
    ),
    **_same("distilbert", "distilbert.embeddings.word_embeddings.weight = vocab_projector.weight"),
    **_same(
        "albert",
        "albert.embeddings.word_embeddings.weight = predictions.decoder.weight",
        "predictions.bias = predictions.decoder.bias",
    ),
    **_same("electra", "electra.embeddings.word_embeddings.weight = generator_lm_head.weight"),
    **_same(
        "deberta deberta-v2",
        "deberta.embeddings.word_embeddings.weight = cls.predictions.decoder.weight",
        "cls.predictions.bias = cls.predictions.decoder.bias",
    ),
    **_same(
        "mpnet",
        "mpnet.embeddings.word_embeddings.weight = lm_head.decoder.weight",
        "lm_head.bias = lm_head.decoder.bias",
    ),
    **_same("modernbert", "model.embeddings.tok_embeddings.weight = decoder.weight"),
    **_same("esm", "esm.embeddings.word_embeddings.weight = lm_head.decoder.weight"),
    **_same(
        "longformer",
        "longformer.embeddings.word_embeddings.weight = lm_head.decoder.weight",
        "lm_head.bias = lm_head.decoder.bias",
    ),
    **_same("xlnet", "transformer.word_embedding.weight = lm_loss.weight"),
    **_same("funnel", "funnel.embeddings.word_embeddings.weight = lm_head.weight"),
    **_same(
        "mobilebert",
        "mobilebert.embeddings.word_embeddings.weight = cls.predictions.decoder.weight",
        "cls.predictions.bias = cls.predictions.decoder.bias",
    ),
    **_same(
        "nomic_bert",
        "nomic_bert.embeddings.word_embeddings.weight = cls.predictions.decoder.weight",
        "cls.predictions.bias = cls.predictions.decoder.bias",
    ),
    **_same(
        "squeezebert",
        "transformer.embeddings.word_embeddings.weight = cls.predictions.decoder.weight",
        "cls.predictions.bias = cls.predictions.decoder.bias",
    ),
    **_same(
        "roformer",
        "roformer.embeddings.word_embeddings.weight = cls.predictions.decoder.weight",
        "cls.predictions.bias = cls.predictions.decoder.bias",
    ),
    **_same("convbert", "convbert.embeddings.word_embeddings.weight = generator_lm_head.weight"),
    **_same(
        "fnet",
        "fnet.embeddings.word_embeddings.weight = cls.predictions.decoder.weight",
        "cls.predictions.bias = cls.predictions.decoder.bias",
    ),
    **_same(
        "bart mbart pegasus marian m2m_100 blenderbot",
        (
            "model.shared.weight = "
            "model.encoder.embed_tokens.weight = "
            "model.decoder.embed_tokens.weight = "
            "lm_head.weight"
        ),
    ),
    **_same(
        "t5 mt5 switch_transformers",
        (
            "shared.weight = "
            "encoder.embed_tokens.weight = "
            "decoder.embed_tokens.weight = "
            "lm_head.weight"
        ),
    ),
    **_same("gpt2 gpt_neo mpt", "transformer.wte.weight = lm_head.weight"),
    **_same("openai-gpt", "transformer.tokens_embed.weight = lm_head.weight"),
    **_same("opt speech_to_text", "model.decoder.embed_tokens.weight = lm_head.weight"),
    **_same("bloom falcon", "transformer.word_embeddings.weight = lm_head.weight"),
    **_same("biogpt", "biogpt.embed_tokens.weight = output_projection.weight"),
    **_same(
        "llama_tied gemma gemma2 gemma3_text smollm3 starcoder2 cohere ernie4_5",
        "model.embed_tokens.weight = lm_head.weight",
    ),
    **_same("mamba", "backbone.embeddings.weight = lm_head.weight"),
    **_same(
        "blip",
        (
            "text_decoder.bert.embeddings.word_embeddings.weight = "
            "text_decoder.cls.predictions.decoder.weight"
        ),
        "text_decoder.cls.predictions.bias = text_decoder.cls.predictions.decoder.bias",
    ),
    **_same("whisper", "model.decoder.embed_tokens.weight = proj_out.weight"),
}
