"""What a model's shape is: the numbers from ``config.json`` that decide its weights, its cache and its arithmetic.

One frozen object serves the loader (which tensors, which shapes), the model (which steps), the cache (how many bytes a
token) and the analysis (how many bytes and FLOPs a step). Anything in a ``config.json`` that this engine would have to
ignore to run is refused here, with the key named, because a model that runs wrongly is worse than one that does not.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.errors import LabError

MOST_LAYERS = 10_000  # ten times what any model has; a damaged config.json names more
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("linear", "llama3", "yarn")


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a Llama-family decoder. Raises LabError if the numbers do not fit together.

    architecture: one of "llama", "mistral", "qwen2", "qwen3". They share one decoder and differ in two switches:
    ``qkv_bias`` (qwen2) and ``qk_norm`` (qwen3: RMSNorm over each query and key head before the rotary embedding).
    rope_scaling: None, or {"rope_type": "linear", "factor": f}, or Llama-3.1's {"rope_type": "llama3", "factor": …,
    "low_freq_factor": …, "high_freq_factor": …, "original_max_position_embeddings": …}, or {"rope_type": "yarn",
    "factor": …, "original_max_position_embeddings": …} and, where they are not YaRN's own, "beta_fast", "beta_slow",
    "attention_factor", "mscale" with "mscale_all_dim", "truncate".
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: dict | None = None
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self):
        if self.architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise LabError(f"the architecture {self.architecture!r} is not supported; this engine runs {known}")
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        for name in (*sizes, "head_dim", "max_positions"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise LabError(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.num_layers > MOST_LAYERS:
            raise LabError(f"num_layers must be at most {MOST_LAYERS}, got {self.num_layers}")
        for name in ("rms_eps", "rope_theta"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise LabError(f"{name} must be a positive number, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise LabError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly: "
                f"num_heads must be a multiple of num_kv_heads"
            )
        if self.head_dim % 2:
            raise LabError(f"head_dim must be even, because the rotary embedding turns pairs, got {self.head_dim}")
        if self.rope_scaling is not None:
            _check_rope_scaling(self.rope_scaling)
        for token in (*self.eos_token_ids, *(() if self.bos_token_id is None else (self.bos_token_id,))):
            if not 0 <= token < self.vocab_size:
                raise LabError(f"special token id {token} lies outside the vocabulary of {self.vocab_size}")

    @classmethod
    def from_hf(cls, hf: dict) -> ModelConfig:
        """Read the contents of a Hugging Face ``config.json``, in transformers' 4.x or 5.x spelling.

        A sliding attention window is honoured by capping ``max_positions`` at it: up to that length a windowed and
        a full causal mask are the same mask. Raises LabError naming the key that is missing or cannot be honoured.
        """
        if not isinstance(hf, dict):
            raise LabError(f"config.json must hold an object, got {type(hf).__name__}")
        architecture = hf.get("model_type")
        if architecture not in ARCHITECTURES:
            raise LabError(f"model_type {architecture!r} is not supported; this engine runs {', '.join(ARCHITECTURES)}")

        def need(key: str):
            if hf.get(key) is None:
                raise LabError(f"config.json has no {key!r}, which a {architecture} model needs")
            return hf[key]

        _refuse_what_would_be_ignored(hf)
        theta, scaling = _rope_from_hf(hf)
        heads, hidden = need("num_attention_heads"), need("hidden_size")
        head_dim = hf.get("head_dim") or (128 if architecture == "qwen3" else None)
        if head_dim is None:
            if heads == 0:
                raise LabError(f"num_attention_heads must be a whole number of at least 1, got {heads!r}")
            if hidden % heads:
                raise LabError(f"hidden_size {hidden} is no multiple of {heads} heads, and config.json has no head_dim")
            head_dim = hidden // heads
        window = hf.get("sliding_window", 4096 if architecture == "mistral" else None)
        if architecture in ("qwen2", "qwen3") and not hf.get("use_sliding_window"):
            window = None
        eos = hf.get("eos_token_id")
        return cls(
            architecture=architecture,
            vocab_size=need("vocab_size"),
            hidden_size=hidden,
            intermediate_size=need("intermediate_size"),
            num_layers=need("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=hf.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            max_positions=min(need("max_position_embeddings"), window or need("max_position_embeddings")),
            rms_eps=need("rms_norm_eps"),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
            qkv_bias=architecture == "qwen2",
            qk_norm=architecture == "qwen3",
            bos_token_id=hf.get("bos_token_id"),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        )

    def to_hf(self) -> dict:
        """The ``config.json`` that ``from_hf`` reads back as this object, and that transformers understands."""
        names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
        eos = self.eos_token_ids
        hf = {
            "architectures": [f"{names[self.architecture]}ForCausalLM"],
            "model_type": self.architecture,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.rms_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": self.rope_scaling,
            "tie_word_embeddings": self.tie_embeddings,
            "hidden_act": "silu",
            "bos_token_id": self.bos_token_id,
            "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else list(eos),
        }
        return hf | ({"sliding_window": None} if self.architecture == "mistral" else {})

    @property
    def q_size(self) -> int:
        """Width of all query heads side by side; differs from hidden_size when head_dim is set on its own."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def embedding_params(self) -> int:
        """Weights of one embedding matrix, [vocab_size, hidden_size]."""
        return self.vocab_size * self.hidden_size

    @property
    def matmul_params(self) -> int:
        """Weights multiplied for every token: the projections of all layers and lm_head.

        The input embedding is left out, since a step reads one row of it a token. A tied model multiplies by the
        same matrix as lm_head, so it counts there.
        """
        attention = self.hidden_size * (self.q_size + 2 * self.kv_size) + self.q_size * self.hidden_size
        mlp = 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * (attention + mlp) + self.embedding_params

    @property
    def num_params(self) -> int:
        """All weights, each stored matrix counted once."""
        bias = self.q_size + 2 * self.kv_size if self.qkv_bias else 0
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        total = self.matmul_params + self.num_layers * (bias + norms) + self.hidden_size
        return total if self.tie_embeddings else total + self.embedding_params

    def kv_bytes_per_token(self, width: int = 2) -> int:
        """Bytes the KV cache takes for one token: a key and a value, each layer, each KV head, ``width`` bytes each."""
        return 2 * self.num_layers * self.kv_size * width


def _refuse_what_would_be_ignored(hf: dict) -> None:
    if hf.get("hidden_act", "silu") != "silu":
        raise LabError(f"hidden_act {hf['hidden_act']!r} is not supported; this engine computes SwiGLU with 'silu'")
    for key in ("attention_bias", "mlp_bias"):
        if hf.get(key):
            raise LabError(f"{key}=true is not supported: of all biases only qwen2's on q, k and v is implemented")
    if hf.get("quantization_config"):
        method = hf["quantization_config"].get("quant_method")
        raise LabError(f"the checkpoint is quantised ({method}); this loader reads plain or AWQ safetensors, or GGUF")
    if hf.get("partial_rotary_factor", 1.0) != 1.0:
        raise LabError("partial_rotary_factor other than 1 is not supported: the rotary embedding turns whole heads")


def _rope_from_hf(hf: dict) -> tuple[float, dict | None]:
    """(theta, scaling). transformers 5 writes both into ``rope_parameters``; 4 wrote two separate keys."""
    scaling = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise LabError(f"rope_scaling in config.json must hold an object or null, got {scaling!r:.60}")
    scaling = dict(scaling)
    theta = scaling.pop("rope_theta", None) or hf.get("rope_theta") or 10_000.0
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    if scaling.pop("partial_rotary_factor", 1.0) != 1.0:
        raise LabError("partial_rotary_factor other than 1 is not supported: the rotary embedding turns whole heads")
    return theta, None if kind == "default" else {"rope_type": kind, **scaling}


def _check_rope_scaling(scaling: dict) -> None:
    kind = scaling.get("rope_type")
    if kind not in ROPE_TYPES:
        raise LabError(f"rope_scaling of type {kind!r} is not supported; this engine knows {', '.join(ROPE_TYPES)}")
    keys = ["factor"]
    if kind == "llama3":
        keys += ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    if kind == "yarn":
        keys += ["original_max_position_embeddings"]
        keys += [k for k in ("beta_fast", "beta_slow", "attention_factor") if scaling.get(k) is not None]
    for key in keys:
        if not isinstance(scaling.get(key), (int, float)) or not 0 < scaling[key] < float("inf"):
            raise LabError(f"rope_scaling of type {kind!r} needs a positive {key!r}, got {scaling.get(key)!r}")
