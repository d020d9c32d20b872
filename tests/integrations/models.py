"""Small random models of transformers, and batches for them."""

from functools import partial

import torch
import transformers as hf

_WORDS = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
_WIDTH = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
}  # fmt: skip
_BERT = {**_WIDTH, **_WORDS, **_DROPOUT, "max_position_embeddings": 32, "num_labels": 3}
_LLAMA = {**_WIDTH, **_WORDS, "num_key_value_heads": 2, "attention_dropout": 0.1}
_QWEN = {**_LLAMA, "head_dim": 8}
_IMAGES = {**_WIDTH, **_DROPOUT, "image_size": 16, "patch_size": 4, "num_labels": 3}
_DECODER = {
    **_WORDS, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "dropout": 0.1,
    "attention_dropout": 0.1,
}  # fmt: skip
_OPTIONS = {
    "bert": ("BertForSequenceClassification", _BERT),
    "roberta": ("RobertaForSequenceClassification", _BERT),
    "distilbert": ("DistilBertForSequenceClassification", {
        **_WORDS, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 32, "num_labels": 3}),
    "modernbert": ("ModernBertForSequenceClassification", {
        **_WIDTH, **_WORDS, "cls_token_id": 1, "sep_token_id": 2, "attention_dropout": 0.1, "mlp_dropout": 0.1,
        "embedding_dropout": 0.1, "num_labels": 3}),
    "deberta_v2": ("DebertaV2ForSequenceClassification", {
        **_BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0}),
    "gpt2": ("GPT2LMHeadModel", {**_WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}),
    "llama": ("LlamaForCausalLM", _LLAMA), "mistral": ("MistralForCausalLM", _QWEN),
    "qwen3": ("Qwen3ForCausalLM", {**_QWEN, "tie_word_embeddings": True}),
    "gemma3": ("Gemma3ForCausalLM", {**_QWEN, "tie_word_embeddings": True}),
    "phi3": ("Phi3ForCausalLM", {**_LLAMA, "resid_pdrop": 0.1, "embd_pdrop": 0.1}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**_QWEN, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    "mamba": ("MambaForCausalLM", {**_WORDS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "time_step_rank": 4}),
    "t5": ("T5ForConditionalGeneration", {
        **_WORDS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}),
    "bart": ("BartForConditionalGeneration", {
        **_DECODER, "max_position_embeddings": 32, "decoder_start_token_id": 2, "forced_eos_token_id": None}),
    "whisper": ("WhisperForConditionalGeneration", {
        **_DECODER, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16, "activation_dropout": 0.1,
        "decoder_start_token_id": 1}),
    "vit": ("ViTForImageClassification", _IMAGES),
    "dinov2": ("Dinov2ForImageClassification", {
        **{k: v for k, v in _IMAGES.items() if k != "intermediate_size"}, "mlp_ratio": 2, "drop_path_rate": 0.1}),
    "convnext": ("ConvNextForImageClassification", {
        "hidden_sizes": [8, 12], "depths": [1, 1], "num_stages": 2, "num_labels": 3, "drop_path_rate": 0.2, "layer_scale_init_value": 0.5}),
    "segformer": ("SegformerForSemanticSegmentation", {
        **_DROPOUT, "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "patch_sizes": [3, 3],
        "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16, "num_labels": 3}),
    "swinv2": ("Swinv2ForImageClassification", {
        **_DROPOUT, "image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4,
        "num_labels": 3, "drop_path_rate": 0.1}),
    "clip": ("CLIPModel", {
        "text_config": {**_WIDTH, **_WORDS, "attention_dropout": 0.1, "projection_dim": 16, "max_position_embeddings": 16},
        "vision_config": {**_WIDTH, "attention_dropout": 0.1, "image_size": 16, "patch_size": 8, "projection_dim": 16},
        "projection_dim": 16}),
    "patchtst": ("PatchTSTForPrediction", {
        "num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4, "d_model": 16, "num_hidden_layers": 2,
        "num_attention_heads": 4, "ffn_dim": 24, "prediction_length": 4, "attention_dropout": 0.1, "ff_dropout": 0.1,
        "path_dropout": 0.1, "head_dropout": 0.1}),
    "wav2vec2": ("Wav2Vec2ForSequenceClassification", {
        **_WIDTH, "vocab_size": 12, "conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (8, 4), "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 8, "num_labels": 3,
        "layerdrop": 0.1, "mask_time_prob": 0.0}),
}  # fmt: skip
_TEXT = ("input_ids", "attention_mask")
_INPUTS = {
    **dict.fromkeys(("vit", "dinov2", "convnext", "segformer", "swinv2"), ("pixel_values",)),
    **dict.fromkeys(("t5", "bart"), (*_TEXT, "decoder_input_ids")), "clip": (*_TEXT, "pixel_values"),
    "whisper": ("input_features", "decoder_input_ids"), "patchtst": ("past_values",),
    "wav2vec2": ("input_values",),
}  # fmt: skip


def make(name, **changes):
    """A model of this name, with other sizes or rates if some are given."""
    kind, options = _OPTIONS[name]
    return getattr(hf, kind)(getattr(hf, kind).config_class(**{**options, **changes}))


def without_dropout(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


# Two kinds of encoders, one with a decoder, two language models and one for images.
MODELS = {n: partial(make, n) for n in ("bert", "distilbert", "gpt2", "vit", "t5", "llama")}


def batch_of(name, rows=3):
    words = torch.randint(3, 64, (rows, 7))
    inputs = {
        "input_ids": words, "attention_mask": torch.ones_like(words),
        "decoder_input_ids": torch.randint(3, 64, (rows, 5)),
        "pixel_values": torch.randn(rows, 3, 16, 16), "input_features": torch.randn(rows, 8, 32),
        "past_values": torch.randn(rows, 16, 2), "input_values": torch.randn(rows, 160),
    }  # fmt: skip
    return {key: inputs[key] for key in _INPUTS.get(name, _TEXT)}


def one_row(output):
    """One row of numbers per example: the logits at the last position of a sequence."""
    return output.logits if output.logits.dim() == 2 else output.logits[:, -1]
