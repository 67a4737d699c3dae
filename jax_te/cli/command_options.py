"""The options of ``jax-te sample``, ``eval``, ``convert`` and ``doctor``; see `jax_te.cli.option_table`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from jax_te._validation import FLOAT_DTYPES
from jax_te.cli.option_table import option, positional
from jax_te.cli.option_values import (
    ARCHITECTURE,
    COUNT,
    FIELD_NAMES,
    FILE,
    FLAG,
    FOLDER,
    MODULE_NAMES,
    NON_NEGATIVE,
    PATH,
    SEED,
    SIZE,
    SWITCH,
    TEXT,
    Text,
)
from jax_te.cli.options import DEFAULT_RUN, FACTORY_MODULES, IGNORED_FIELDS
from jax_te.cli.presets import PRESETS
from jax_te.typing import GpuName, PricedRecipe

MegatronFormat = Literal["torch", "torch_dist"]
DEQUANTIZE = "multiply out the kernels of {} that are stored in FP8 with scales for blocks"
A_RUN, A_FOLDER = "a run, which --init-from takes the place of", "--init-from"
FROM_RUN, FROM_FOLDER = "a run of jax-te train as FROM", "a Hugging Face folder as FROM"
FROM_MEGATRON, FROM_STEPS = "a Megatron-LM checkpoint as FROM", "a run or a Megatron-LM folder as FROM"
TO_MEGATRON, TO_FOLDER = "a Megatron-LM checkpoint as TO", "a folder of Hugging Face or PEFT as TO"
TO_MODEL, UPCYCLED = "a whole model as TO, which adapters are not", "--upcycle"
A_GPU = "--gpu"
RANDOM = "a --temperature above 0"
CHECK_MEMORY = "refuse a model that, by an estimate, does not fit into memory"


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """Generate text with a trained model.

    Text is generated from the newest checkpoint of a run, with a key/value cache and without quantization. The run
    is of a decoder.
    """

    output: str = option(FOLDER, "folder of the run", DEFAULT_RUN)
    prompt: str = option(TEXT, "text to continue", "def ", shown="'def '")
    length: int = option(SIZE, "number of tokens to generate", 256)
    temperature: float = option(NON_NEGATIVE, "temperature of sampling; 0 takes the likeliest token", 0.8)
    top_k: int = option(COUNT, "number of likeliest tokens to sample from; 0 samples from all", 0, needs=(RANDOM,))
    seed: int = option(SEED, "seed of sampling", 0, needs=(RANDOM,))
    check_memory: bool = option(FLAG, CHECK_MEMORY, True)
    factory_modules: str | None = option(MODULE_NAMES, FACTORY_MODULES, None)


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """Show the loss and the perplexity of a model on a text.

    Every token of the text but the first is predicted once, in windows that follow each other without overlap,
    under the run's recipe and on one device. The text may have any format that jax-te train accepts. Of a BERT,
    RoBERTa, T5 or mT5 the loss is that of the tokens masked or removed in each whole window, always the same ones.
    """

    output: str | None = option(
        FOLDER, "folder of the run", None, shown=f"{DEFAULT_RUN}, unless --init-from is given", needs=(A_RUN,)
    )
    step: int | None = option(COUNT, "step of the checkpoint to evaluate", None, shown="the newest", needs=(A_RUN,))
    init_from: str | None = option(FOLDER, "Hugging Face model folder to evaluate in place of a run", None)
    ignore_fields: str | None = option(
        FIELD_NAMES, IGNORED_FIELDS.format("--init-from"), None, shown="none", needs=(A_FOLDER,)
    )
    dequantize: bool = option(SWITCH, DEQUANTIZE.format("--init-from"), False, needs=(A_FOLDER,))
    dtype: str | None = option(
        FLOAT_DTYPES, "dtype of the parameters of --init-from", None, shown="that of its tensors", needs=(A_FOLDER,)
    )
    tokenizer: str | None = option(
        PATH,
        "tokenizer.json file, or a folder that contains one; needs --init-from, since a run has its own",
        None,
        shown="--init-from's",
        needs=(A_FOLDER,),
    )
    data: str | None = option(
        PATH, "text to evaluate on, a file or a folder; needed with --init-from", None, shown="the run's held-out text"
    )
    batch_size: int | None = option(
        SIZE, "number of windows per batch", None, shown="a microbatch of the run; 1 with --init-from"
    )
    seq_len: int | None = option(
        SIZE, "window length in tokens; a T5's encoder's", None, shown="the run's; with --init-from at most 512"
    )
    check_memory: bool = option(FLAG, CHECK_MEMORY, True)
    factory_modules: str | None = option(MODULE_NAMES, FACTORY_MODULES, None, needs=(A_RUN,))
    json: bool = option(SWITCH, "print JSON", False, shown="lines")


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Convert a model to the format of Hugging Face or Megatron-LM.

    FROM is a run of jax-te train or one of its checkpoints, a Hugging Face folder, a Megatron-LM folder (formats
    torch and torch_dist) or the *.pt file of one rank. TO is a new folder, or for Megatron-LM also a new *.pt file.
    LoRA adapters of a run are merged, or written alone with --to peft. Optimizer states and FP8 scales are not
    converted; neither are tokenizers to or from Megatron-LM.
    """

    source: str = positional(Text("FROM", str), "checkpoint to read")
    target: str = positional(Text("TO", str), "checkpoint to write, which must not exist yet")
    to: str | None = option(
        ("huggingface", "megatron", "peft"),
        "format of TO",
        None,
        shown="huggingface; megatron if FROM is Hugging Face's",
    )
    dtype: str | None = option(
        FLOAT_DTYPES,
        "dtype of the parameters in TO",
        None,
        shown="that of FROM, of a run its --params-dtype; of PEFT's that of the adapters",
    )
    step: int | None = option(
        SIZE,
        "step of the checkpoint to read, if FROM is a run or a Megatron-LM folder",
        None,
        shown="the newest",
        needs=(FROM_STEPS,),
    )
    megatron_args: str | None = option(
        FILE, "JSON file with Megatron-LM arguments that checkpoint FROM lacks", None, needs=(FROM_MEGATRON,)
    )
    vocab_size: int | None = option(
        SIZE,
        "vocabulary size of a Megatron-LM checkpoint FROM, without padding rows",
        None,
        shown="all rows",
        needs=(FROM_MEGATRON,),
    )
    megatron_format: MegatronFormat | None = option(
        get_args(MegatronFormat),
        "format of a Megatron-LM folder TO, its --ckpt-format",
        None,
        shown="torch",
        needs=(TO_MEGATRON,),
    )
    tensor_parallel: int = option(
        SIZE,
        "number of tensor-parallel ranks of a Megatron-LM checkpoint TO of the format torch",
        1,
        needs=(TO_MEGATRON,),
    )
    upcycle: int | None = option(
        SIZE,
        "number of experts, copies of each feed-forward block that take its place in TO",
        None,
        shown="no experts",
        needs=(TO_MODEL,),
    )
    upcycle_topk: int | None = option(
        SIZE, "number of experts of each token, with --upcycle", None, shown="2", needs=(UPCYCLED,)
    )
    architecture: str | None = option(
        ARCHITECTURE,
        "Hugging Face architecture of TO, e.g. LlamaForCausalLM; an unknown name lists all",
        None,
        shown="the first that can represent the model",
        needs=(TO_FOLDER,),
    )
    ignore_fields: str | None = option(
        FIELD_NAMES,
        IGNORED_FIELDS.format("a Hugging Face folder FROM"),
        None,
        shown="none",
        needs=(FROM_FOLDER,),
    )
    dequantize: bool = option(SWITCH, DEQUANTIZE.format("a Hugging Face folder FROM"), False, needs=(FROM_FOLDER,))
    factory_modules: str | None = option(MODULE_NAMES, FACTORY_MODULES, None, needs=(FROM_RUN,))


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Show versions, devices, backends, and which recipes run here; or which recipe pays for a model.

    Every recipe is tried on a small layer with each backend; if one cannot run, its line says what to do.

    With --gpu it says in place of that how long a train step takes on such a GPU under each recipe, by kind of kernel,
    from a table of measured rates. No GPU is needed. The step is that of jax-te bench model on one device: forward,
    backward and AdamW on fp32 masters, with bf16 parameters and without recomputation.
    """

    gpu: GpuName | None = option(
        get_args(GpuName), "GPU for which the time of a train step is predicted", None, shown="none"
    )
    preset: str | None = option(
        tuple(PRESETS), "preset of jax-te train whose model it is", None, shown="none", needs=(A_GPU,)
    )
    model_config: str | None = option(
        PATH,
        "config.json in Hugging Face's form, or a folder with one: the model, in place of a preset's",
        None,
        needs=(A_GPU,),
    )
    recipes: tuple[PricedRecipe, ...] = option(
        get_args(PricedRecipe),
        "precision recipes to predict, of which the first is compared with",
        get_args(PricedRecipe),
        several=True,
        shown=" ".join(get_args(PricedRecipe)),
        needs=(A_GPU,),
    )
    num_layers: int | None = option(SIZE, "number of layers", None, shown="the model's", needs=(A_GPU,))
    vocab_size: int | None = option(SIZE, "vocabulary size", None, shown="the model's; bytes", needs=(A_GPU,))
    batch_size: int | None = option(SIZE, "sequences per step", None, shown="the preset's", needs=(A_GPU,))
    seq_len: int | None = option(SIZE, "sequence length in tokens", None, shown="the preset's", needs=(A_GPU,))
