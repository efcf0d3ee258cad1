"""An ONNX file with silero's inputs and outputs that tells what it was given, and files that are refused."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

STATE_STEP = 0.0001
"""So small that a long quiet stays quiet."""
PACKAGED = {"silero_vad": "data/silero_vad.onnx", "pipecat": "audio/vad/data/silero_vad.onnx"}


def write_network(path: Path, names: Sequence[str] = ("input", "state", "sr"), state_size: int = 128) -> Path:
    """output = the first sample of the context + the mean of the state; stateN = state + STATE_STEP.

    names: of sound, state and rate, in this order.
    """
    sound, state, rate = names
    nodes = [
        helper.make_node("Slice", [sound, "start", "end", "axis"], ["first"]),
        helper.make_node("ReduceMean", [state], ["mean"], axes=[0, 2], keepdims=0),
        helper.make_node("Add", ["first", "mean"], ["output"]),
        helper.make_node("Add", [state, "step"], ["stateN"]),
    ]
    inputs = [
        helper.make_tensor_value_info(sound, TensorProto.FLOAT, [1, 576]),
        helper.make_tensor_value_info(state, TensorProto.FLOAT, [2, 1, state_size]),
        helper.make_tensor_value_info(rate, TensorProto.INT64, []),
    ]
    outputs = [
        helper.make_tensor_value_info("output", TensorProto.FLOAT, [1, 1]),
        helper.make_tensor_value_info("stateN", TensorProto.FLOAT, [2, 1, state_size]),
    ]
    constants = [
        *(
            numpy_helper.from_array(np.array([at], np.int64), name)
            for name, at in (("start", 0), ("end", 1), ("axis", 1))
        ),
        numpy_helper.from_array(np.array(STATE_STEP, np.float32), "step"),
    ]
    graph = helper.make_graph(nodes, "told", inputs, outputs, constants)
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString(deterministic=True))
    return path


def packaged_silero() -> Path:
    """The real one, out of an installed package that brings it; without one the test is skipped."""
    for package, file in PACKAGED.items():
        found = find_spec(package)
        if found is not None and found.origin is not None:
            return Path(found.origin).parent / file
    pytest.skip(f"no silero_vad.onnx: none of {', '.join(PACKAGED)} is installed")
