"""Options of the model on its device. The command line is derived from this class: defaults stand only here.

The scheduler's own options are engine/config.py's. Long because each option stands with its help text, and
what devices refuse stands beside them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pegainfer.app.options import name_of
from pegainfer.contract.errors import ConfigError
from pegainfer.ops.ranks import TensorRank

ACTIVATIONS = ("auto", "int8", "bf16", "f32")
KV_DTYPES = ("auto", "f32", "f16", "bf16", "fp8")
STATE_DTYPES = ("f32", "bf16")
BACKENDS = ("cpu", "reference", "cuda")
LOAD_FORMATS = ("auto", "dummy")
ROLES = ("both", "prefill", "decode")
MOST_PEER_TIMEOUT = 86_400.0  # seconds; sockets refuse much longer timeouts
QUANTIZATIONS = ("int4", "int8", "fp8")  # ops/quantize_on_load.py


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What is loaded, how it computes and how much it may hold."""

    max_model_len: int | None = field(
        default=None,
        metadata={
            "help": "Tokens of a sequence, prompt and answer, as 4096 or 4k; default: the model's own.",
            "parse": "count",
        },
    )
    threads: int | None = field(
        default=None,
        metadata={
            "help": "Threads that compute, of each rank; default: the cores this process may use, shared out "
            "to the ranks."
        },
    )
    isa: str | None = field(
        default=None, metadata={"help": "Kernels' instruction set; default: the best this processor has."}
    )
    activation: str = field(
        default="auto",
        metadata={
            "help": "Activations: int8 beside quantised weights (faster), f32 (exact), bf16: also rounded to "
            "bf16 beside bf16 weights where the processor multiplies it; auto: bf16. A GPU computes in bf16.",
            "parse": "dtype",
        },
    )
    quantization: str | None = field(
        default=None,
        metadata={
            "help": "Quantise a plain model while it is loaded: int8 (8.5 bits a weight), int4 (5; embedding "
            "and head in 8) or fp8 (8.25; embedding and head stay as they are; of GPUs only Hopper keeps "
            "it). The formats of a quantised file need no option."
        },
    )
    kv_dtype: str = field(
        default="auto",
        metadata={
            "help": "Storage of keys and values: f32 (exact), f16 (half the memory, quicker from some 1,000 "
            "tokens on), fp8 (e4m3, a quarter, and half of a GPU's bf16; scales as the checkpoint has them, "
            "else 1); auto: f32, bf16 on a GPU.",
            "parse": "dtype",
        },
    )
    state_dtype: str = field(
        default="f32",
        metadata={
            "help": "Storage of recurrent states (the delta rule's matrices), which are computed in float32: "
            "f32, or bf16 (half the memory, and less of it moved for each token; each step rounds).",
            "parse": "dtype",
        },
    )
    kv_cache_memory: int | None = field(
        default=None,
        metadata={
            "help": "Memory for keys, values and recurrent states, such as 512MiB; default: a quarter of the "
            "free memory, 1 GiB at most, or what one sequence needs; on a GPU what "
            "--gpu-memory-utilization leaves.",
            "parse": "bytes",
        },
    )
    snapshot_share: float = field(
        default=0.3,
        metadata={
            "help": "For models with recurrent states: share of the KV cache's memory, beyond the states of "
            "--max-num-seqs sequences, that keeps snapshots of states for prefix reuse; pages get the rest."
        },
    )
    kv_offload: int = field(
        default=0,
        metadata={
            "help": "Host memory for KV blocks that leave the KV cache, as 16GiB: a later prompt with the "
            "same prefix loads them instead of computing them again; 0: none.",
            "parse": "bytes",
        },
    )
    kv_offload_disk: str = field(
        default="",
        metadata={
            "help": "Folder and size of a disk tier for KV blocks, as /var/cache/kv:200GiB. It outlives the "
            "server. One engine a folder."
        },
    )
    role: str = field(
        default="both",
        metadata={
            "help": "both: an engine alone; prefill: computes prompts of decode engines, too; decode: lets "
            "the engines of --prefill-peers compute its prompts, and loads their blocks.",
        },
    )
    peer_listen: str = field(
        default="127.0.0.1:7600",
        metadata={
            "help": "With --role prefill: where decode engines connect, HOST:PORT, unix:PATH, which shares "
            "memory with engines on this host, or nixl:HOST:PORT, which moves blocks through NIXL."
        },
    )
    prefill_peers: str = field(
        default="",
        metadata={"help": "With --role decode: addresses of prefill engines, separated by commas."},
    )
    peer_secret_file: str = field(
        default="",
        metadata={"help": "File of the secret that peers share; needed for addresses of other machines."},
    )
    peer_timeout: float = field(
        default=5.0,
        metadata={
            "help": "Seconds without a word of a peer after which it counts as lost, or as too slow for a "
            "prompt, which is then computed here."
        },
    )
    kv_events_config: str = field(
        default="",
        metadata={
            "help": "JSON object that lets routers follow the prefix cache over ZeroMQ, as vLLM's: "
            '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}.'
        },
    )
    tensor_parallel_size: int = field(
        default=1,
        metadata={
            "help": "Processes that compute each sequence together, each with a part of every layer, on the "
            "CPU, on a GPU each, or the null device."
        },
    )
    enable_expert_parallel: bool = field(
        default=False,
        metadata={"help": "Give each of these ranks some whole experts, not a share of every one."},
    )
    data_parallel_size: int = field(
        default=1,
        metadata={
            "help": "Groups of such ranks, each with sequences and a KV cache of its own, that step "
            "together; so far the null device's."
        },
    )
    enable_lora: bool = field(default=False, metadata={"help": "Serve LoRA adapters."})
    max_loras: int = field(
        default=8, metadata={"help": "Adapters that the device holds, which is as many as a step may mix."}
    )
    max_cpu_loras: int | None = field(
        default=None,
        metadata={
            "help": "Adapters that the host's memory keeps ready; others are read from their files when a "
            "request names them. Default: --max-loras."
        },
    )
    max_lora_rank: int = field(default=16, metadata={"help": "Greatest rank of an adapter."})
    expert_stats: bool = field(
        default=False,
        metadata={"help": "Count the tokens of each expert for /metrics (mixtures of experts, one rank)."},
    )
    device_ordinal: int = field(
        default=0, metadata={"help": "Which GPU; the first, where each of several ranks has its own."}
    )
    share_gpu: bool = field(
        default=False, metadata={"help": "All ranks on that one GPU: for tests, since they take turns."}
    )
    gpu_memory_utilization: float = field(
        default=0.9, metadata={"help": "Share of the GPU's memory that this process may take."}
    )
    cuda_graph: bool = field(
        default=True, metadata={"help": "Replay steps as CUDA graphs rather than launch each kernel."}
    )
    load_format: str = field(
        default="auto",
        metadata={"help": "auto: the model's file; dummy: seeded weights from config.json alone."},
    )
    backend: str = field(
        default="cpu",
        metadata={"help": "cpu, cuda, or reference: NumPy, slow, what the others are compared with."},
    )

    def place_of(self, rank: int) -> TensorRank:
        return TensorRank(rank, self.tensor_parallel_size, self.enable_expert_parallel)

    def ordinal_of(self, rank: int) -> int:
        """The GPU of a tensor-parallel rank."""
        return self.device_ordinal + (0 if self.share_gpu else rank)

    @property
    def kv_format(self) -> str:
        """kv_dtype with auto decided: bf16 on a GPU, else f32.

        f16 decodes 1.6 to 2 times as many tokens a second from a context of 2,000 on, and costs the exact
        path nothing to speak of. But 8-bit activations turn its small differences into large ones, and with
        them the default model's first answer (NOTES.md of the llama line), so it is not chosen unasked.
        """
        if self.kv_dtype != "auto":
            return "f8_e4m3" if self.kv_dtype == "fp8" else self.kv_dtype
        return "bf16" if self.backend == "cuda" else "f32"

    def __post_init__(self) -> None:
        # A sequence is a token of prompt and one of answer at least.
        least_of = {
            "max_model_len": 2,
            "threads": 1,
            "kv_cache_memory": 1,
            "tensor_parallel_size": 1,
            "data_parallel_size": 1,
            "max_loras": 1,
            "max_lora_rank": 1,
            "max_cpu_loras": self.max_loras,
        }
        for name, least in least_of.items():
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise ConfigError(f"bad {name}", expected=f"a whole number from {least}", got=repr(value))
        choices = {
            "activation": ACTIVATIONS,
            "kv_dtype": KV_DTYPES,
            "state_dtype": STATE_DTYPES,
            "backend": BACKENDS,
            "load_format": LOAD_FORMATS,
            "role": ROLES,
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(f"bad {name_of(name)}", expected=" or ".join(allowed), got=repr(value))
        if self.quantization not in (None, *QUANTIZATIONS):
            raise ConfigError(
                "bad quantization", expected=" or ".join(QUANTIZATIONS), got=repr(self.quantization),
                remedy="leave it out for a quantised file: its formats are read from it",
            )  # fmt: skip
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                "bad gpu_memory_utilization", expected="0 < share ≤ 1", got=self.gpu_memory_utilization
            )
        if not 0.0 <= self.snapshot_share < 1.0:
            raise ConfigError("bad snapshot_share", expected="0 ≤ share < 1", got=self.snapshot_share)
        if type(self.kv_offload) is not int or self.kv_offload < 0:
            raise ConfigError("bad kv_offload", expected="bytes, 0 or more", got=repr(self.kv_offload))
        if not 0.0 < self.peer_timeout <= MOST_PEER_TIMEOUT:
            raise ConfigError(
                "bad peer_timeout", expected=f"0 < seconds ≤ {MOST_PEER_TIMEOUT}", got=self.peer_timeout
            )
        if self.device_ordinal < 0:
            raise ConfigError("bad device_ordinal", expected="0 or more", got=self.device_ordinal)

    def check_backend(self) -> None:
        """Raises ConfigError where the backend does not do what is asked for. Called when it is decided."""
        cuda = self.backend == "cuda"
        if cuda and self.activation not in ("auto", "bf16"):
            raise ConfigError(
                "a GPU computes in bf16",
                expected="auto or bf16",
                got=self.activation,
                where="activation_dtype",
            )
        if self.data_parallel_size > 1:
            raise ConfigError(
                "only the null device has data-parallel ranks so far", expected=1,
                got=self.data_parallel_size, where="data_parallel_size",
            )  # fmt: skip
        if self.tensor_parallel_size > 1 and self.backend == "reference":
            raise ConfigError(
                "backend reference has one rank", expected=1, got=self.tensor_parallel_size,
                where="tensor_parallel_size", remedy="choose --device cpu or cuda",
            )  # fmt: skip
        if self.share_gpu and self.tensor_parallel_size == 1:
            raise ConfigError(
                "there are no other ranks to share the GPU with", expected="2 or more", got=1,
                where="tensor_parallel_size", remedy="leave share_gpu out",
            )  # fmt: skip
        if cuda and self.kv_dtype not in ("auto", "bf16", "fp8"):
            raise ConfigError(
                "the GPU's kernels keep keys and values as bf16 or fp8", expected="auto, bf16 or fp8",
                got=self.kv_dtype, where="kv_cache_dtype",
            )  # fmt: skip
        if self.expert_stats and self.tensor_parallel_size > 1:
            raise ConfigError(
                "tokens of experts are counted by one rank alone", expected=1, got=self.tensor_parallel_size,
                where="expert_stats",
            )  # fmt: skip
        if not cuda and self.kv_dtype == "bf16":
            raise ConfigError(
                "only a GPU keeps keys and values as bf16", expected="auto, f32, f16 or fp8", got="bf16",
                where="kv_cache_dtype",
            )  # fmt: skip
        if self.load_format == "dummy" and self.tensor_parallel_size > 1 and not cuda:
            raise ConfigError(
                "dummy weights are made up for ranks on GPUs alone", expected=1,
                got=self.tensor_parallel_size, where="tensor_parallel_size",
            )  # fmt: skip
