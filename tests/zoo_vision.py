"""Image models. 32x32 pixels in patches of 8: 17 tokens with the class token."""

import torch
from zoo_base import BATCH, IMAGE, Inputs, classify_image, entry, image, noise, same_class

VIT = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "image_size": IMAGE,
    "patch_size": 8,
    "num_labels": 2,
}
RESNET = {
    "model_type": "resnet",
    "embedding_size": 16,
    "hidden_sizes": [16, 32],
    "depths": [1, 1],
    "layer_type": "basic",
    "out_features": ["stage2"],
}


def classify_112() -> Inputs:
    return {"pixel_values": noise(BATCH, 3, 112, 112), "labels": same_class()}


def segment() -> Inputs:
    labels = torch.randint(0, 2, (BATCH, IMAGE, IMAGE), generator=torch.Generator().manual_seed(2))
    return {**image(), "labels": labels}


def masked() -> Inputs:
    return {**image(), "noise": noise(BATCH, 16, seed=2).abs()}


def large_image() -> Inputs:
    return {"pixel_values": noise(BATCH, 3, 64, 64)}


def video() -> Inputs:
    return {"pixel_values": noise(BATCH, 2, 3, IMAGE, IMAGE), "labels": same_class()}


ENTRIES = (
    # 197 tokens, as at full size.
    entry(
        "vit",
        "ViTForImageClassification",
        "ViTConfig",
        classify_112,
        **{**VIT, "image_size": 112},
    ),
    entry("deit", "DeiTForImageClassification", "DeiTConfig", classify_image, **VIT),
    entry(
        "dinov2",
        "Dinov2ForImageClassification",
        "Dinov2Config",
        classify_image,
        mlp_ratio=2,
        **VIT,
    ),
    entry("beit", "BeitForImageClassification", "BeitConfig", classify_image, **VIT),
    entry(
        "swin",
        "SwinForImageClassification",
        "SwinConfig",
        classify_image,
        image_size=IMAGE,
        patch_size=2,
        embed_dim=16,
        depths=[2, 1],
        num_heads=[1, 2],
        window_size=4,
        num_labels=2,
    ),
    entry(
        "swinv2",
        "Swinv2ForImageClassification",
        "Swinv2Config",
        classify_image,
        image_size=IMAGE,
        patch_size=2,
        embed_dim=16,
        depths=[2, 1],
        num_heads=[1, 2],
        window_size=4,
        num_labels=2,
    ),
    # Channels-first LayerNorm subclasses between the stages.
    entry(
        "convnext",
        "ConvNextForImageClassification",
        "ConvNextConfig",
        classify_image,
        num_stages=2,
        hidden_sizes=[16, 32],
        depths=[1, 1],
        num_labels=2,
    ),
    entry(
        "segformer",
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        segment,
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[32, 64],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=32,
        num_labels=2,
    ),
    # No labels: the matching loss of the detection families needs SciPy. The class of Mask2Former
    # with that loss cannot even be built without; the model inside has the layers that matter.
    entry(
        "detr",
        "DetrForObjectDetection",
        "DetrConfig",
        large_image,
        backbone_config=RESNET,
        num_queries=13,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        num_labels=2,
    ),
    entry(
        "yolos",
        "YolosForObjectDetection",
        "YolosConfig",
        image,
        num_detection_tokens=13,
        **{**VIT, "image_size": [IMAGE, IMAGE]},
    ),
    entry(
        "mask2former",
        "Mask2FormerModel",
        "Mask2FormerConfig",
        large_image,
        backbone_config={
            "model_type": "swin",
            "image_size": 64,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [1, 1, 1, 1],
            "num_heads": [1, 2, 2, 2],
            "window_size": 4,
            "out_features": ["stage1", "stage2", "stage3", "stage4"],
        },
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=64,
        dim_feedforward=64,
        encoder_layers=1,
        decoder_layers=3,
        num_attention_heads=2,
        num_queries=13,
        num_labels=2,
    ),
    entry(
        "vit_mae",
        "ViTMAEForPreTraining",
        "ViTMAEConfig",
        masked,
        decoder_hidden_size=32,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=64,
        **VIT,
    ),
    entry(
        "videomae",
        "VideoMAEForVideoClassification",
        "VideoMAEConfig",
        video,
        num_frames=2,
        tubelet_size=2,
        **VIT,
    ),
    entry(
        "dpt",
        "DPTForSemanticSegmentation",
        "DPTConfig",
        segment,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[16, 16, 32, 32],
        fusion_hidden_size=16,
        **{**VIT, "num_hidden_layers": 4},
    ),
)
