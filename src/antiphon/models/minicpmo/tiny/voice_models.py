"""Stand-ins for the two ONNX models that compute a voice: inputs, outputs, shapes and types of the official ones.

The speech tokenizer's finite scalar quantisation is the real one (REFERENCE 9.1); what is quantised is one random
convolution. Names and shapes: REFERENCE 2.9.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from antiphon.models.minicpmo.tiny.weights import normal

_OPSET, _IR_VERSION = 17, 8
_FRAMES_PER_TOKEN = 4
_NUM_DIGITS = 8
_TOKEN_MEL_BINS, _SPEAKER_MEL_BINS, _SPEAKER_SIZE = 128, 80, 192


def write_speech_tokenizer(path: Path) -> None:
    """feats [1, 128, T] float32, feats_length [1] int32 -> indices [1, ceil(T / 4)] int32, 0 to 6560."""
    # Without a mean over the bins it follows the sound's colour, not its loudness, which is much alike in all frames.
    kernel = 0.4 * _normal("speech tokenizer", (_NUM_DIGITS, _TOKEN_MEL_BINS, _FRAMES_PER_TOKEN))
    kernel -= kernel.mean(axis=1, keepdims=True)
    powers = (3 ** np.arange(_NUM_DIGITS, dtype=np.float32)).reshape(1, _NUM_DIGITS, 1)
    nodes = [
        helper.make_node(
            "Conv", ["feats", "kernel"], ["features"], strides=[_FRAMES_PER_TOKEN], pads=[0, _FRAMES_PER_TOKEN - 1]
        ),
        helper.make_node("Tanh", ["features"], ["bounded"]),
        helper.make_node("Round", ["bounded"], ["signs"]),
        helper.make_node("Add", ["signs", "one"], ["digits"]),
        helper.make_node("Mul", ["digits", "powers"], ["places"]),
        helper.make_node("ReduceSum", ["places", "digit_axis"], ["codes"], keepdims=0),
        helper.make_node("Cast", ["codes"], ["indices"], to=TensorProto.INT32),
    ]
    inputs = [
        helper.make_tensor_value_info("feats", TensorProto.FLOAT, [1, _TOKEN_MEL_BINS, "T"]),
        helper.make_tensor_value_info("feats_length", TensorProto.INT32, [1]),
    ]
    output = helper.make_tensor_value_info("indices", TensorProto.INT32, [1, "tokens"])
    constants = [
        numpy_helper.from_array(kernel, "kernel"),
        numpy_helper.from_array(powers, "powers"),
        numpy_helper.from_array(np.ones(1, np.float32), "one"),
        numpy_helper.from_array(np.ones(1, np.int64), "digit_axis"),
    ]
    _write(path, helper.make_graph(nodes, "speech_tokenizer", inputs, [output], constants))


def write_speaker_encoder(path: Path) -> None:
    """input [1, T, 80] float32 -> output [1, 192] float32."""
    # The features come without their mean over time, so only something that is not linear in them has a mean.
    weight = 0.2 * _normal("speaker encoder", (_SPEAKER_MEL_BINS, _SPEAKER_SIZE))
    nodes = [
        helper.make_node("MatMul", ["input", "weight"], ["features"]),
        helper.make_node("Relu", ["features"], ["rectified"]),
        helper.make_node("ReduceMean", ["rectified"], ["means"], axes=[1], keepdims=0),
        helper.make_node("Sub", ["means", "one"], ["output"]),
    ]
    inputs = [helper.make_tensor_value_info("input", TensorProto.FLOAT, [1, "T", _SPEAKER_MEL_BINS])]
    output = helper.make_tensor_value_info("output", TensorProto.FLOAT, [1, _SPEAKER_SIZE])
    constants = [numpy_helper.from_array(weight, "weight"), numpy_helper.from_array(np.ones(1, np.float32), "one")]
    _write(path, helper.make_graph(nodes, "speaker_encoder", inputs, [output], constants))


def _normal(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    values: NDArray[np.float32] = normal(name, shape).numpy()
    return values


def _write(path: Path, graph: onnx.GraphProto) -> None:
    model = helper.make_model(
        graph, producer_name="antiphon", ir_version=_IR_VERSION, opset_imports=[helper.make_opsetid("", _OPSET)]
    )
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString(deterministic=True))
