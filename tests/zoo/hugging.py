"""Small random models of transformers, built from configs."""

import torch
import transformers as hf

_WIDTH = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
}  # fmt: skip
_WORDS = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
_SPECIAL = {"cls_token_id": 1, "sep_token_id": 2}
_GROUPED = {**_WIDTH, **_WORDS, "num_key_value_heads": 2, "attention_dropout": 0.1}


def modernbert():
    dropout = {"attention_dropout": 0.1, "mlp_dropout": 0.1, "embedding_dropout": 0.1}
    config = hf.ModernBertConfig(**_WIDTH, **_WORDS, **_SPECIAL, **dropout, num_labels=3)
    return hf.ModernBertForSequenceClassification(config)


def deberta_v2():
    options = {"max_position_embeddings": 32, "num_labels": 3, "relative_attention": True}
    config = hf.DebertaV2Config(
        **_WIDTH, **_WORDS, **_DROPOUT, **options, pos_att_type=["p2c", "c2p"], type_vocab_size=0
    )
    return hf.DebertaV2ForSequenceClassification(config)


def roberta():
    config = hf.RobertaConfig(
        **_WIDTH, **_WORDS, **_DROPOUT, max_position_embeddings=32, num_labels=3
    )
    return hf.RobertaForSequenceClassification(config)


def qwen3():
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**_GROUPED, head_dim=8, tie_word_embeddings=True))


def gemma3():
    config = hf.Gemma3TextConfig(**_GROUPED, head_dim=8, tie_word_embeddings=True)
    return hf.Gemma3ForCausalLM(config)


def phi3():
    config = hf.Phi3Config(**_GROUPED, resid_pdrop=0.1, embd_pdrop=0.1)
    return hf.Phi3ForCausalLM(config)


def mistral():
    return hf.MistralForCausalLM(hf.MistralConfig(**_GROUPED, head_dim=8))


def qwen3_moe():
    options = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**_GROUPED, **options, head_dim=8))


def whisper():
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "num_mel_bins": 8}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    wide = {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_source_positions": 16}
    config = hf.WhisperConfig(
        **sizes, **heads, **wide, **_WORDS, max_target_positions=16, dropout=0.1,
        attention_dropout=0.1, activation_dropout=0.1, decoder_start_token_id=1,
    )  # fmt: skip
    return hf.WhisperForConditionalGeneration(config)


def bart():
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = hf.BartConfig(
        **sizes, **heads, **_WORDS, encoder_ffn_dim=48, decoder_ffn_dim=48, dropout=0.1,
        attention_dropout=0.1, max_position_embeddings=32, decoder_start_token_id=2,
        forced_eos_token_id=None,
    )  # fmt: skip
    return hf.BartForConditionalGeneration(config)


def mamba():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "time_step_rank": 4}
    return hf.MambaForCausalLM(hf.MambaConfig(**sizes, **_WORDS))


def clip():
    side = {**_WIDTH, "attention_dropout": 0.1}
    text = hf.CLIPTextConfig(**side, **_WORDS, projection_dim=16, max_position_embeddings=16)
    vision = hf.CLIPVisionConfig(**side, image_size=16, patch_size=8, projection_dim=16)
    config = hf.CLIPConfig(
        text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=16
    )
    return hf.CLIPModel(config)


def dinov2():
    config = hf.Dinov2Config(
        **{k: v for k, v in _WIDTH.items() if k != "intermediate_size"}, **_DROPOUT, mlp_ratio=2,
        image_size=16, patch_size=4, num_labels=3, drop_path_rate=0.1,
    )  # fmt: skip
    return hf.Dinov2ForImageClassification(config)


def convnext():
    config = hf.ConvNextConfig(
        hidden_sizes=[8, 12], depths=[1, 1], num_stages=2, num_labels=3, drop_path_rate=0.2
    )
    return hf.ConvNextForImageClassification(config)


def segformer():
    config = hf.SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16],
        patch_sizes=[3, 3], strides=[2, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2],
        decoder_hidden_size=16, num_labels=3, **_DROPOUT,
    )  # fmt: skip
    return hf.SegformerForSemanticSegmentation(config)


def swinv2():
    config = hf.Swinv2Config(
        image_size=16, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=4,
        num_labels=3, drop_path_rate=0.1, **_DROPOUT,
    )  # fmt: skip
    return hf.Swinv2ForImageClassification(config)


def patchtst():
    config = hf.PatchTSTConfig(
        num_input_channels=2, context_length=16, patch_length=4, patch_stride=4, d_model=16,
        num_hidden_layers=2, num_attention_heads=4, ffn_dim=24, prediction_length=4,
        attention_dropout=0.1, ff_dropout=0.1, path_dropout=0.1, head_dropout=0.1,
    )  # fmt: skip
    return hf.PatchTSTForPrediction(config)


def wav2vec2():
    config = hf.Wav2Vec2Config(
        **_WIDTH, vocab_size=12, conv_dim=(8, 8), conv_stride=(4, 2), conv_kernel=(8, 4),
        num_feat_extract_layers=2, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        classifier_proj_size=8, num_labels=3, layerdrop=0.1, mask_time_prob=0.0,
    )  # fmt: skip
    return hf.Wav2Vec2ForSequenceClassification(config)


def words(rows):
    ids = torch.randint(3, 64, (rows, 7))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def pixels(rows):
    return {"pixel_values": torch.randn(rows, 3, 16, 16)}
