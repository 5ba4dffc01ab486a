"""Speech, text with images, and time series."""

import torch
from zoo_base import BATCH, IMAGE, TOKENS, Inputs, entry, ids, image, noise, same_class
from zoo_decoders import LLAMA
from zoo_encoders import BART, BERT
from zoo_vision import VIT

SPEECH = {
    "vocab_size": 32,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "conv_dim": [32, 32],
    "conv_stride": [5, 2],
    "conv_kernel": [10, 3],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "pad_token_id": 0,
    "apply_spec_augment": False,
}
TOWER = {key: value for key, value in VIT.items() if key != "num_labels"}
SIDE = 4  # patches on each side of the image


def two_towers() -> Inputs:
    return {"input_ids": ids(), **image(), "return_loss": True}


def caption() -> Inputs:
    return {"input_ids": ids(), **image(), "labels": ids(seed=2)}


def question() -> Inputs:
    mask = torch.ones(BATCH, IMAGE, IMAGE, dtype=torch.long)
    return {"input_ids": ids(), **image(), "pixel_mask": mask, "labels": torch.eye(2)}


def image_in_text() -> Inputs:
    text = torch.cat([torch.full((BATCH, SIDE * SIDE), 3), ids(tokens=7)], dim=1)
    return {"input_ids": text, **image(), "labels": text}


def waveform() -> Inputs:
    return {"input_values": noise(BATCH, 400), "labels": ids(tokens=5, seed=2) % 27 + 5}


def spectrogram_seq2seq() -> Inputs:
    return {
        "input_features": noise(BATCH, 16, 26),
        "decoder_input_ids": ids(tokens=7, seed=3),
        "labels": ids(tokens=7, seed=2),
    }


def filterbank_seq2seq() -> Inputs:
    return {**spectrogram_seq2seq(), "input_features": noise(BATCH, 52, 16)}


def spectrogram() -> Inputs:
    return {"input_values": noise(BATCH, 32, 16), "labels": same_class()}


def series() -> Inputs:
    return {"past_values": noise(BATCH, 40, 3), "future_values": noise(BATCH, 8, 3, seed=2)}


def trajectory() -> Inputs:
    return {
        "states": noise(BATCH, TOKENS, 17),
        "actions": noise(BATCH, TOKENS, 4, seed=2),
        "returns_to_go": noise(BATCH, TOKENS, 1, seed=3),
        "timesteps": torch.arange(TOKENS).repeat(BATCH, 1),
        "attention_mask": torch.ones(BATCH, TOKENS),
    }


ENTRIES = (
    entry(
        "clip",
        "CLIPModel",
        "CLIPConfig",
        two_towers,
        text_config=BERT,
        vision_config=TOWER,
        projection_dim=32,
    ),
    # nn.MultiheadAttention in the pooling head: its out_proj is never called.
    entry(
        "siglip",
        "SiglipModel",
        "SiglipConfig",
        two_towers,
        text_config={**BERT, "projection_size": 64},
        vision_config=TOWER,
    ),
    entry(
        "blip",
        "BlipForConditionalGeneration",
        "BlipConfig",
        caption,
        text_config={
            **BERT,
            "encoder_hidden_size": 64,
            "sep_token_id": 2,
        },
        vision_config=TOWER,
        projection_dim=32,
        image_text_hidden_size=32,
    ),
    entry(
        "llava",
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        image_in_text,
        text_config={**LLAMA, "model_type": "llama"},
        vision_config={**TOWER, "model_type": "clip_vision_model", "projection_dim": 32},
        image_token_id=3,
        image_seq_length=SIDE * SIDE,
    ),
    entry("vilt", "ViltForQuestionAnswering", "ViltConfig", question, **{**BERT, **VIT}),
    entry(
        "whisper",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        spectrogram_seq2seq,
        num_mel_bins=16,
        max_source_positions=TOKENS,
        max_target_positions=64,
        begin_suppress_tokens=None,
        **BART,
    ),
    entry(
        "speech_to_text",
        "Speech2TextForConditionalGeneration",
        "Speech2TextConfig",
        filterbank_seq2seq,
        input_feat_per_channel=16,
        conv_channels=32,
        max_source_positions=64,
        max_target_positions=64,
        **BART,
    ),
    entry("wav2vec2", "Wav2Vec2ForCTC", "Wav2Vec2Config", waveform, **SPEECH),
    entry("hubert", "HubertForCTC", "HubertConfig", waveform, **SPEECH),
    # Attention reads the weights of q/k/v/out_proj and calls none of them.
    entry(
        "wavlm",
        "WavLMForCTC",
        "WavLMConfig",
        waveform,
        num_buckets=32,
        max_bucket_distance=64,
        **SPEECH,
    ),
    entry(
        "data2vec_audio",
        "Data2VecAudioForCTC",
        "Data2VecAudioConfig",
        waveform,
        **{**SPEECH, "num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 5},
    ),
    entry(
        "ast",
        "ASTForAudioClassification",
        "ASTConfig",
        spectrogram,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        patch_size=8,
        frequency_stride=8,
        time_stride=8,
        max_length=32,
        num_mel_bins=16,
        num_labels=2,
    ),
    entry(
        "patchtst",
        "PatchTSTForPrediction",
        "PatchTSTConfig",
        series,
        num_input_channels=3,
        context_length=40,
        prediction_length=8,
        patch_length=8,
        patch_stride=8,
        d_model=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=128,
        loss="mse",
    ),
    entry(
        "decision_transformer",
        "DecisionTransformerModel",
        "DecisionTransformerConfig",
        trajectory,
        state_dim=17,
        act_dim=4,
        hidden_size=64,
        n_layer=2,
        n_head=4,
        max_ep_len=64,
        n_positions=64,
    ),
)
