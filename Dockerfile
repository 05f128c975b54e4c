# docker build -t psm .                       CPU
# docker build -t psm --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 .     CUDA
# docker run --rm -v "$PWD:/work" psm pretrain out=runs/a data=images
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN python -m venv /opt/psm && /opt/psm/bin/pip install --no-cache-dir torch --index-url ${TORCH_INDEX}
COPY pyproject.toml setup.py README.md LICENSE /source/
COPY src /source/src
RUN /opt/psm/bin/pip install --no-cache-dir '/source[parquet,faiss,onnx,shards,jpeg]'

FROM python:3.12-slim
COPY --from=build /opt/psm /opt/psm
ENV PATH=/opt/psm/bin:$PATH MPLCONFIGDIR=/tmp/matplotlib
WORKDIR /work
ENTRYPOINT ["psm"]
CMD ["--help"]
