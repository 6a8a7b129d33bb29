"""How the ranks share the work: replicas for the data, and those that split a model."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod

from megatron_zpp.settings.capability_flags import CAPABILITIES
from megatron_zpp.settings.flag import Section, flags_in
from megatron_zpp.settings.gpt.model import ModelConfig
from zeropp.errors import InputError
from zeropp.settings import Rule, declared, one_of

SIZES = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
OTHER_SIZES = tuple(declared("SIZES", CAPABILITIES))  # of ranks that split what is in a layer
STAGES_PER_RANK = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
_NO_RING = (
    "not available: allgather sends the same bytes as a ring of p2p messages, and a2a fewer "
    "if there are few heads"
)
LAYERS_OF_ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
_NO_COUNTS = (
    "not available: type:transformer|embedding counts each embedding as much as a block, and "
    "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers give the ends "
    "fewer blocks"
)
_flag = flags_in(
    "parallel.toml",
    {"--context-parallel-size": lambda c: c.parallel.context_parallel_size > 1},
)
_BY_TYPE = "type:"
# The names of DeepSpeed's layers for what is before, in and after the stack of blocks.
_BLOCK, _END = "ParallelTransformerLayerPipe", "EmbeddingPipe"


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(*declared("PARALLEL", CAPABILITIES), Section):
    """How the ranks share the work: those that split a model, and replicas for the data."""

    tensor_model_parallel_size: int = _flag(1)
    pipeline_model_parallel_size: int = _flag(1)
    context_parallel_size: int = _flag(1)
    num_layers_per_virtual_pipeline_stage: int | None = _flag(None)
    num_virtual_stages_per_pipeline_rank: int | None = _flag(None)
    decoder_first_pipeline_num_layers: int | None = _flag(None)
    decoder_last_pipeline_num_layers: int | None = _flag(None)
    pp_partition_method: str | None = _flag(
        None, refused=dict.fromkeys(("parameters", "profile"), _NO_COUNTS)
    )
    cp_comm_type: str = _flag("a2a", refused=dict.fromkeys(("p2p", "a2a+p2p"), _NO_RING))
    sequence_parallel: bool = _flag(False)
    distributed_backend: str | None = _flag(None)
    distributed_timeout_minutes: float = _flag(10.0)

    rules = (
        *(
            Rule(
                (name, "pipeline_model_parallel_size"),
                lambda layers, size: layers is not None and size == 1,
                "{} divides the layers of a pipeline: give --pipeline-model-parallel-size 2 or "
                "more, or leave it out",
            )
            for name in (*STAGES_PER_RANK, *LAYERS_OF_ENDS)
        ),
        one_of(*STAGES_PER_RANK, message="{} say the same in two ways: give one of them"),
        *(
            one_of("pp_partition_method", name, message="{} both divide the layers: give one")
            for name in LAYERS_OF_ENDS
        ),
        Rule(
            ("pp_partition_method",),
            lambda method: method and method != "uniform" and not _counted(method),
            "{}: expected uniform, type:transformer or type:transformer|embedding",
        ),
    )

    def data_parallel_size(self, world_size: int) -> int:
        """Return how many ranks, or groups of ranks that split a model, see different samples.

        Raises InputError if the ranks cannot be divided into such groups.
        """
        divided = {name: getattr(self, name) for name in SIZES if getattr(self, name) > 1}
        for name, size in divided.items():
            if world_size % size:
                fitting = [each for each in range(1, world_size + 1) if world_size % each == 0]
                nearest = min(fitting, key=lambda each: abs(each - size))
                raise InputError(
                    f"{self._shown(name)} does not divide the {world_size} ranks: the nearest that "
                    f"does is {nearest}"
                )
        if world_size % prod(divided.values()):
            raise InputError(
                f"{' times '.join(map(self._shown, divided))} does not divide the {world_size} "
                "ranks"
            )
        return world_size // prod(divided.values())

    def stages(self, num_layers: int) -> list[range]:
        """Return the layers of each stage of the pipeline; stage i is on its rank i modulo P.

        Raises InputError for layers that cannot be divided like this.
        """
        by_rank = self._layers_by_rank(num_layers)
        per_stage, chunks = (getattr(self, name) for name in STAGES_PER_RANK)
        chunks = chunks or (max(1, by_rank[0] // per_stage) if per_stage else 1)
        if any(count % chunks or per_stage not in (None, count // chunks) for count in by_rank):
            name = STAGES_PER_RANK[0 if per_stage else 1]
            raise InputError(
                f"{self._shown(name)}: the ranks of the pipeline have {_listed(by_rank)} layers, "
                "and each would have to be divided into equally many stages of as many layers"
            )
        sizes = [count // chunks for count in by_rank] * chunks
        return [range(first, end) for first, end in pairwise((0, *accumulate(sizes)))]

    def world_ranks(self, ranks_per_node: int) -> int:
        """Return how many ranks an independent replica has.

        Those of a node, or of several if a model takes as many. Raises InputError if they do not
        fit.
        """
        of_model = prod(getattr(self, name) for name in SIZES)
        if of_model % ranks_per_node and ranks_per_node % of_model:
            raise InputError(
                f"a model takes {of_model} ranks ({', '.join(map(self._shown, SIZES))}), which is "
                f"neither a part of a node's {ranks_per_node} ranks nor whole nodes, and "
                "zeropp.sync_every trains nodes independently"
            )
        return max(of_model, ranks_per_node)

    def require_divides(self, model: ModelConfig) -> None:
        """Raise InputError for sizes of a model that these ranks cannot share out."""
        tensor, context = self.tensor_model_parallel_size, self.context_parallel_size
        by_tensor, by_context = (
            f"--tensor-model-parallel-size {tensor}",
            f"--context-parallel-size {context}",
        )
        by_both = f"{by_tensor} times {by_context}"
        heads = "--num-query-groups" if model.num_query_groups else "--num-attention-heads"
        vocabulary = (
            "--pad-vocab-size-to" if model.pad_vocab_size_to else "--make-vocab-size-divisible-by"
        )
        self._require_whole_sequences(model)
        groups = model.kv_heads
        if groups < tensor and tensor % groups == 0 and not model.multi_latent_attention:
            _require_shared_groups(model, tensor)
            groups = tensor
        splits_rows, exchanges_heads = self.sequence_parallel, self.cp_comm_type == "a2a"
        rows, by_rows = (tensor * context, by_both) if splits_rows else (context, by_context)
        if context > 1 and not exchanges_heads:
            rows, by_rows = 2 * rows, f"{by_rows} in two parts each (--cp-comm-type allgather)"
        for name, count, size, splits in (
            (heads, groups, tensor, by_tensor),
            (
                "--num-attention-heads",
                model.num_attention_heads,
                tensor * (context if exchanges_heads else 1),
                by_both,
            ),
            ("--ffn-hidden-size", model.ffn_size, tensor, by_tensor),
            (vocabulary, model.make_vocab_size_divisible_by, tensor, by_tensor),
            ("--seq-length", model.seq_length, rows, by_rows),
        ):
            if count % size:
                nearest = max(size, round(count / size) * size)
                raise InputError(
                    f"{name} {count} cannot be split over {splits}: the nearest that can is "
                    f"{nearest}"
                )

    def _require_whole_sequences(self, model: ModelConfig) -> None:
        """Raise InputError for attention that ranks which share sequences cannot compute."""
        if self.context_parallel_size == 1:
            return
        if model.position_embedding_type == "alibi" and self.cp_comm_type == "a2a":
            raise InputError(
                "--position-embedding-type alibi with --context-parallel-size "
                f"{self.context_parallel_size}: --cp-comm-type a2a moves heads between ranks, "
                "which differ in their slopes: use --cp-comm-type allgather"
            )
        if model.longrope_long_factors and model.seq_length > model.longrope_original_positions:
            raise InputError(
                f"--seq-length {model.seq_length} is longer than --longrope-original-positions "
                f"{model.longrope_original_positions}: LongRoPE's factors depend on whole "
                "sequences, which --context-parallel-size divides: leave it out, or train shorter "
                "sequences"
            )

    def _layers_by_rank(self, num_layers: int) -> list[int]:
        """Return how many layers each rank of a pipeline has."""
        size = self.pipeline_model_parallel_size
        if self.pp_partition_method:
            return self._shares_by_type(num_layers)
        first, last = (getattr(self, name) for name in LAYERS_OF_ENDS)
        num_others = size - (first is not None) - (last is not None)
        left = num_layers - (first or 0) - (last or 0)
        shown = f"--num-layers {num_layers} over {self._shown('pipeline_model_parallel_size')}"
        if num_layers < size:
            raise InputError(
                f"{shown}: there are more ranks than layers; the most that fit are {num_layers}"
            )
        if left < num_others:
            raise InputError(
                f"{shown}: the ends have {num_layers - left} layers, and {num_others} other ranks "
                "need one each: give the ends fewer, or the model more"
            )
        count, excess = divmod(left, num_others) if num_others else (0, left)
        if excess:
            raise InputError(
                f"{shown}: {left} layers cannot be shared out equally to {num_others} ranks; "
                f"{excess} fewer can. --decoder-first-pipeline-num-layers and "
                "--decoder-last-pipeline-num-layers give the ends other numbers of layers"
            )
        counts = (first, *[count] * num_others, last)
        return [count for count in counts if count is not None]

    def _shares_by_type(self, num_layers: int) -> list[int]:
        """Return the shares of --pp-partition-method, the larger ones last: they differ by 1."""
        size, method = self.pipeline_model_parallel_size, self.pp_partition_method
        at_ends = int(_END in _counted(method))
        count, excess = divmod(num_layers + 2 * at_ends, size)
        counts = [count] * (size - excess) + [count + 1] * excess
        counts[0], counts[-1] = counts[0] - at_ends, counts[-1] - at_ends
        if min(counts) < 1:
            raise InputError(
                f"--num-layers {num_layers} over {self._shown('pipeline_model_parallel_size')} by "
                f"{self._shown('pp_partition_method')}: a rank would have no block; give fewer "
                "ranks or more layers"
            )
        return counts

    def _shown(self, name: str) -> str:
        return f"--{name.replace('_', '-')} {getattr(self, name)}"


def _counted(method: str) -> tuple[str, ...]:
    """The names of layers that --pp-partition-method counts; none if it is not one that we have."""
    if method == "uniform":
        return (_BLOCK,)
    try:
        pattern = re.compile(method.removeprefix(_BY_TYPE), re.IGNORECASE)
    except re.error:
        return ()
    names = tuple(name for name in (_BLOCK, _END) if pattern.search(name))
    return names if method.startswith(_BY_TYPE) and _BLOCK in names else ()


def _listed(counts: Sequence[int]) -> str:
    """List the distinct numbers."""
    return " and ".join(map(str, dict.fromkeys(counts)))


def _require_shared_groups(model: ModelConfig, tensor: int) -> None:
    """Raise InputError for heads of keys and values that `tensor` ranks cannot share."""
    words = f"--num-query-groups {model.kv_heads} below --tensor-model-parallel-size {tensor}"
    for name in ("qk_layernorm_across_heads", "qk_layernorm_per_head"):
        if getattr(model, name):
            raise InputError(
                f"{words}: --{name.replace('_', '-')} needs a key of its own on each rank: lower "
                "the second to the first"
            )
    if 2 * model.kv_heads * model.head_dim % tensor:
        raise InputError(
            f"{words}: the {2 * model.kv_heads} x {model.head_dim} channels of keys and values "
            "cannot be shared out equally: change --kv-channels, or lower the second"
        )
