"""docs/parity.md: it has every name of the reference documents, and what it says is there, is there."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent
TEXT = (TESTS.parent / "docs" / "parity.md").read_text()

# The names of the three documents, by section; a method or function with its arguments behind it.
NAMES = {
    "core.extensions.transformer_engine": {
        "Data": "_TE_CONFIG_TYPE_KEY",
        "TransformerEngineConfigType": "TransformerEngineConfigType TEQuantizationParams",
        "TEQuantizationRecipe": """
            TEQuantizationRecipe fp8_quantization_recipe fp4_quantization_recipe custom_recipe_factory fp8_format
            override_quantized_autocast override_nonquantized_autocast tp_only_amax_red
            parse_from_config(quant_config) get_config_keys
        """,
        "TEQuantizationParams": """
            TEQuantizationParams training_recipe evaluation_recipe parse_from_config(quant_config)
        """,
        "Functions": """
            _get_fp8_autocast_for_quant_recipe(qrecipe) _get_fp8_autocast_for_quant_params(qparams, training)
            _get_should_context_be_quantized_recipe(qrecipe, is_original_context_quantized)
            _get_should_context_be_quantized_params(qparams, training, is_context_quantized)
            _get_extra_te_kwargs(config) condition_init_method(config, init_method)
            split_te_layernorm_column_parallel_linear(fused_layer, config, init_method, tp_group)
            te_checkpoint(forward_func, distribute_saved_activations, get_rng_state_tracker, tp_group, args, kwargs)
            set_save_original_input(module)
        """,
        "TENorm": "TENorm config hidden_size eps",
        "TELinear": """
            TELinear input_size output_size parallel_mode config init_method bias skip_bias_add
            skip_weight_param_allocation tp_comm_buffer_name is_expert symmetric_ar_type tp_group
            set_tensor_parallel_group finish_init(quantization_config) will_execute_quantized(is_context_quantized)
            forward(x) sharded_state_dict(prefix, sharded_offsets, metadata) backward_dw
        """,
        "TELayerNormColumnParallelLinear": """
            TELayerNormColumnParallelLinear input_size output_size config init_method gather_output bias
            skip_bias_add is_expert skip_weight_param_allocation tp_comm_buffer_name tp_group
            finish_init(quantization_config) will_execute_quantized(is_context_quantized) forward(x)
            sharded_state_dict(prefix, sharded_offsets, metadata) __repr__ backward_dw
        """,
        "TEColumnParallelLinear": """
            TEColumnParallelLinear input_size output_size config init_method gather_output bias skip_bias_add
            is_expert skip_weight_param_allocation tp_comm_buffer_name tp_group sharded_state_dict(prefix,
            sharded_offsets, metadata) __repr__ backward_dw
        """,
        "TERowParallelLinear": """
            TERowParallelLinear input_size output_size config init_method bias input_is_parallel skip_bias_add
            is_expert tp_comm_buffer_name tp_group sharded_state_dict(prefix, sharded_offsets, metadata) __repr__
            backward_dw
        """,
        "TEDotProductAttention": """
            TEDotProductAttention config layer_number attn_mask_type attention_type attention_dropout softmax_scale
            k_channels v_channels num_splits cp_comm_type pg_collection set_tensor_parallel_group
            set_context_parallel_group cp_stream forward(query, key, value, attention_mask, attn_mask_type,
            attention_bias, packed_seq_params, num_splits) sharded_state_dict(prefix, sharded_offsets, metadata)
        """,
        "TEDelayedScaling": "TEDelayedScaling config fp8_format override_linear_precision",
        "TECudaRNGStatesTracker": """
            TECudaRNGStatesTracker is_inference_rng_tracker is_initialized reset set_states(states) add(name, seed)
        """,
    },
    "transformer_engine.pytorch": {
        "Linear": """
            Linear in_features out_features bias init_method sequence_parallel tp_group tp_size
            set_tensor_parallel_group(tp_group) parallel_mode skip_weight_param_allocation fuse_wgrad_accumulation
            return_bias params_dtype forward(inp, weight, bias, is_first_microbatch)
        """,
        "LayerNorm": "LayerNorm hidden_size eps sequence_parallel params_dtype",
        "LayerNormLinear": """
            LayerNormLinear in_features out_features eps bias init_method return_layernorm_output sequence_parallel
            tp_group tp_size set_tensor_parallel_group(tp_group) parallel_mode skip_weight_param_allocation
            fuse_wgrad_accumulation return_bias params_dtype forward(inp, weight, bias, is_first_microbatch)
        """,
        "LayerNormMLP": """
            LayerNormMLP hidden_size ffn_hidden_size eps bias init_method output_layer_init_method
            return_layernorm_output set_parallel_mode sequence_parallel tp_group tp_size
            set_tensor_parallel_group(tp_group) fuse_wgrad_accumulation return_bias params_dtype seq_length
            micro_batch_size forward(inp, is_first_microbatch)
        """,
        "TransformerLayer": """
            TransformerLayer hidden_size ffn_hidden_size num_attention_heads layernorm_epsilon hidden_dropout
            attention_dropout init_method output_layer_init_method apply_residual_connection_post_layernorm
            layer_number apply_query_key_layer_scaling output_layernorm attention_softmax_in_fp32 layer_type
            kv_channels self_attn_mask_type set_parallel_mode sequence_parallel tp_group tp_size
            set_tensor_parallel_group(tp_group) fuse_wgrad_accumulation params_dtype seq_length micro_batch_size
            drop_path_rate fuse_qkv_params forward(hidden_states, attention_mask, encoder_output, enc_dec_attn_mask,
            is_first_microbatch, checkpoint_core_attention, inference_params)
        """,
        "Functions": """
            fp8_autocast(enabled, fp8_recipe, fp8_group) checkpoint(function, distribute_saved_activations,
            get_cuda_rng_tracker, tp_group, args, kwargs)
        """,
    },
    "core.transformer.module": {
        "Data": "_FLOAT_TYPES _HALF_TYPES _BF16_TYPES",
        "MegatronModule": """
            MegatronModule config state_dict_for_save_checkpoint(prefix, keep_vars) sharded_state_dict(prefix,
            sharded_offsets, metadata) set_is_first_microbatch set_symmetric_ar(set_to)
        """,
        "GraphableMegatronModule": """
            GraphableMegatronModule config vp_stage get_layer_static_inputs(seq_length, micro_batch_size)
            setup_manual_hooks(make_hook_func) _get_submodules_under_cudagraphs _te_cuda_graph_capture(args, kwargs)
            _te_cuda_graph_replay(args, kwargs) _get_te_cuda_graph_replay_args(args, kwargs)
            _should_call_local_cudagraph(args, kwargs) _should_call_te_cudagraph(args, kwargs) __call__(args, kwargs)
        """,
        "Functions": """
            param_is_not_shared(param) conversion_helper(val, conversion) fp32_to_float16(val, float16_convertor)
            float16_to_fp32(val)
        """,
        "Float16Module": """
            Float16Module config module fp16 bf16 set_input_tensor(input_tensor) forward(inputs, fp32_output, kwargs)
            state_dict(destination, prefix, keep_vars) state_dict_for_save_checkpoint(prefix, keep_vars)
            sharded_state_dict(prefix, args, kwargs) load_state_dict(state_dict, strict)
        """,
    },
}

# What may be open: why -> the sections, or the first names of rows.
OPEN = {
    "pipeline stages": {"MegatronModule", "set_input_tensor", "sharded_state_dict"},
    "expert dispatch": {"is_expert"},
}

NAME = re.compile(r"(jax_te(?:\.\w+)+)(?:\((\w+)=\))?")
TEST = re.compile(r"([\w/]*\w\.py)?::(test_\w+)")


@dataclass(frozen=True)
class Row:
    document: str
    section: str
    name: str
    where: str
    test: str

    @property
    def is_open(self) -> bool:
        return "open" in re.split(r"\W+", re.sub("`[^`]*`", "", self.where))

    @property
    def root(self) -> str:
        return self.name.partition("(")[0]


def read() -> list[Row]:
    rows, document, section = [], "", ""
    for line in TEXT.splitlines():
        if line.startswith("## "):
            (document,) = re.findall("`([^`]+)`", line)
        elif line.startswith("### "):
            section = line.removeprefix("### ")
        elif document and line.startswith("| ") and not line.startswith("| name "):
            name, where, _, test = (cell.strip() for cell in line.strip("|").split(" | "))
            rows.append(Row(document, section, name.strip("`"), where, test))
    return rows


ROWS = read()
SECTIONS = [(document, section) for document, sections in NAMES.items() for section in sections]


def expand(text: str) -> list[str]:
    """``f(a, b)`` -> ``f``, ``f(a)``, ``f(b)``."""
    names = []
    for name, arguments in re.findall(r"(\w+)(?:\(([^)]*)\))?", text):
        names += [name, *(f"{name}({argument})" for argument in re.findall(r"\w+", arguments))]
    return names


def find(dotted: str) -> Any:
    """What a dotted name stands for: the longest part of it that is a module, and attributes of that."""
    parts = dotted.split(".")
    for size in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:size]))
        except ModuleNotFoundError as error:
            if error.name is None or not dotted.startswith(error.name):
                raise
            continue
        return functools.reduce(getattr, parts[size:], found)
    raise AssertionError(f"{dotted} cannot be imported")


def parameters(function: Any) -> set[str]:
    if inspect.isclass(function):
        function = function.__init__ if function.__init__ is not object.__init__ else function.__new__
    return set(inspect.signature(function).parameters)


@functools.cache
def functions_in(file: str) -> set[str]:
    return {node.name for node in ast.parse((TESTS / file).read_text()).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("document", "section"), SECTIONS)
def test_every_name_of_the_documents_has_one_row(document: str, section: str):
    found = [row.name for row in ROWS if (row.document, row.section) == (document, section)]
    assert found == expand(NAMES[document][section])


def test_there_are_no_other_sections():
    assert list(dict.fromkeys((row.document, row.section) for row in ROWS)) == SECTIONS


def test_every_name_of_jax_te_can_be_imported():
    """Also those beside the tables; arguments are in the signature, methods on the class."""
    spans = set(re.findall("`(jax_te[^`]*)`", TEXT))
    assert len(spans) > 200
    for span in sorted(spans):
        match = NAME.fullmatch(span)
        assert match, f"{span} is neither a dotted name nor one with an argument"
        found = find(match[1])
        if match[2]:
            assert match[2] in parameters(found), f"{match[1]} has no argument {match[2]}"


def test_every_test_exists_and_every_row_has_one():
    for row in ROWS:
        spans, file = re.findall("`([^`]+)`", row.test), ""
        for span in spans:
            match = TEST.fullmatch(span)
            assert match, f"{row.name}: {span} is no test"
            file = match[1] or file
            assert (TESTS / file).is_file(), f"{row.name}: there is no tests/{file}"
            assert match[2] in functions_in(file), f"{row.name}: tests/{file} has no {match[2]}"
        assert spans or row.where.startswith("open "), f"{row.section}, {row.name}: which test holds it?"


def test_what_is_not_open_is_somewhere():
    for row in ROWS:
        places = [NAME.fullmatch(span) for span in re.findall("`([^`]+)`", row.where)]
        assert all(places), f"{row.name}: {row.where}"
        assert places or row.is_open, f"{row.section}, {row.name} is nowhere"
        if "(" in row.name and places:
            assert all(place and place[2] for place in places), f"{row.section}, {row.name}: which argument is it?"


def test_open_is_only_what_may_be():
    stated = re.findall(r"^\| ([\w ]+) \| ", TEXT[: TEXT.index("\n## ")], re.MULTILINE)
    assert stated == ["group", *OPEN]
    for row in filter(lambda row: row.is_open, ROWS):
        match = re.fullmatch(r"(?:`[^`]+`; )?open \(([^)]+)\)", row.where)
        assert match, f"{row.section}, {row.name}: {row.where}"
        assert match[1] in OPEN, f"{row.section}, {row.name} is open for another reason: {match[1]}"
        assert row.root in OPEN[match[1]], f"{row.section}, {row.name} may not be open"
