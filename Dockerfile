# From a clone:
#   docker build -t tune-recipes .
#   docker run --rm -it --gpus all --ipc=host -v "$PWD:/work" -v "$HOME/.cache/huggingface:/root/.cache/huggingface" \
#       tune-recipes run demo/full
# For machines without a GPU: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu
FROM python:3.12-slim

# torch.compile builds kernels with a C compiler, for a CPU with one of C++.
RUN apt-get update && apt-get install -y --no-install-recommends g++ libc6-dev && rm -rf /var/lib/apt/lists/*

# torch first and alone: the largest layer is built anew for another version of torch alone.
ARG TORCH_INDEX=https://pypi.org/simple
WORKDIR /tmp/tune-recipes
COPY constraints.txt ./
RUN pip install --no-cache-dir --no-compile --index-url "$TORCH_INDEX" --extra-index-url https://pypi.org/simple -c constraints.txt torch

COPY pyproject.toml README.md LICENSE ./
COPY recipe_lib recipe_lib
COPY recipes recipes
COPY configs configs
COPY examples/demo examples/demo
RUN pip install --no-cache-dir --no-compile -c constraints.txt ".[datasets]"

# As yourself: docker run --user "$(id -u):$(id -g)" -e HOME=/work
WORKDIR /work
ENTRYPOINT ["tune"]
CMD ["--help"]
