"""transformers beside the engine: the same shape with random weights, the same prompts, the same process.

Imported only when asked for. Where it is not installed, or a part of it is not there in the installed version, an error
says so and the benchmark leaves that row out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from labkit.engine.config import ModelConfig
from labkit.errors import LabError

_CLASSES = {"llama": "LlamaConfig", "mistral": "MistralConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}


def transformers_model(config: ModelConfig, dtype: torch.dtype, device: str, attention: str = "sdpa"):
    """A transformers model of this shape with random weights. Raises LabError where transformers is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise LabError(f"transformers is not installed, so there is nothing to compare with ({error})") from error
    c = config
    shape = dict(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim, max_position_embeddings=c.max_positions, rms_norm_eps=c.rms_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta}, tie_word_embeddings=c.tie_embeddings,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    settings = getattr(transformers, _CLASSES[c.architecture])(**shape)
    with torch.device(device):  # drawn there: 8 billion numbers take a CPU minutes
        model = transformers.AutoModelForCausalLM.from_config(settings, dtype=dtype, attn_implementation=attention)
    return model.eval()


@torch.inference_mode()
def generate_rate(model, prompt: Sequence[int], batch: int, new: int) -> float:
    """Tokens a second of ``generate``, prompts included."""
    ids = torch.tensor([list(prompt)] * batch, device=model.device)
    _settle(model.device)
    start = time.perf_counter()
    settings = dict(do_sample=False, max_new_tokens=new, min_new_tokens=new, pad_token_id=0)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    _settle(model.device)
    spent = time.perf_counter() - start
    if out.shape[1] != len(prompt) + new:
        raise LabError(f"transformers made {out.shape[1] - len(prompt)} tokens a row, and {new} were asked for")
    return batch * new / spent


def continuous_rate(model, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> float:
    """Tokens a second of transformers' continuous batching, each request with its own number of new tokens.

    Raises LabError if the installed version has none, or it does not take a length a request.
    """
    if not hasattr(model, "continuous_batching_context_manager"):
        raise LabError("the installed transformers has no continuous batching")
    import transformers

    settings = transformers.GenerationConfig(
        do_sample=False, max_new_tokens=max(lengths), eos_token_id=-1, pad_token_id=0
    )
    made = ended = 0
    with model.continuous_batching_context_manager(generation_config=settings, block=True, timeout=60) as manager:
        start = time.perf_counter()  # its graphs are captured by now
        for ids, new in zip(prompts, lengths, strict=True):
            manager.add_request(list(ids), max_new_tokens=int(new))
        while ended < len(prompts):
            result = manager.get_result(timeout=60)
            if result is None:
                raise LabError(f"transformers' continuous batching ended after {ended} of {len(prompts)} requests")
            if result.is_finished():
                ended += 1
                made += len(result.generated_tokens)
        spent = time.perf_counter() - start  # without its shutdown
    if made < 0.99 * sum(lengths):
        raise LabError(f"transformers' continuous batching made {made} tokens, and {sum(lengths)} were asked for")
    return made / spent


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
