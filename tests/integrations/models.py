"""Small random models of transformers, and batches for them."""

import torch
import transformers as hf

_WIDTH = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_WIDTH |= {"intermediate_size": 48}
_WORDS = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}


def bert():
    config = hf.BertConfig(**_WIDTH, **_WORDS, **_DROPOUT, max_position_embeddings=32, num_labels=3)
    return hf.BertForSequenceClassification(config)


def distilbert():
    size = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}
    config = hf.DistilBertConfig(**size, **_WORDS, max_position_embeddings=32, num_labels=3)
    return hf.DistilBertForSequenceClassification(config)


def gpt2():
    size = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**size, **_WORDS))


def vit():
    config = hf.ViTConfig(**_WIDTH, **_DROPOUT, image_size=16, patch_size=4, num_labels=3)
    return hf.ViTForImageClassification(config)


def t5():
    size = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    words = {**_WORDS, "decoder_start_token_id": 0}
    return hf.T5ForConditionalGeneration(hf.T5Config(**size, **words))


def llama():
    config = hf.LlamaConfig(**_WIDTH, **_WORDS, num_key_value_heads=2, attention_dropout=0.1)
    return hf.LlamaForCausalLM(config)


MODELS = {f.__name__: f for f in (bert, distilbert, gpt2, vit, t5, llama)}


def batch_of(name, rows=3):
    if name == "vit":
        return {"pixel_values": torch.randn(rows, 3, 16, 16)}
    words = torch.randint(3, 64, (rows, 7))
    batch = {"input_ids": words, "attention_mask": torch.ones_like(words)}
    if name == "t5":
        batch["decoder_input_ids"] = torch.randint(3, 64, (rows, 5))
    return batch


def one_row(output):
    """One row of numbers per example: the logits at the last position of a sequence."""
    return output.logits if output.logits.dim() == 2 else output.logits[:, -1]
