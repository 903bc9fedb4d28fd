# A pretrainer on PyTorch's public image: docs/installation.md shows how to build and start it.
ARG PYTORCH=2.13.0-cuda13.0-cudnn9-runtime
FROM pytorch/pytorch:${PYTORCH}

# Triton compiles a launcher in C for each kernel. The image may have both packages; then this does nothing.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends gcc libc6-dev python3-dev \
    && rm -rf /var/lib/apt/lists/*

# The image has one Python, whose packages belong to nobody else.
ENV PYTHONUNBUFFERED=1 \
    PIP_BREAK_SYSTEM_PACKAGES=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1

# Dependencies first: this layer is built again only when one of these files changes.
WORKDIR /opt/megatron_lite
COPY setup.py pyproject.toml ./
COPY megatron_lite/__init__.py megatron_lite/
RUN touch README.md pretrain_gpt.py && pip install ".[data,fast,tensorboard]"

COPY README.md LICENSE pretrain_gpt.py ./
COPY megatron_lite megatron_lite
RUN pip install --no-deps --force-reinstall .

# Started with --user, the container has no home folder and no name for its user, which the caches of Triton ask for.
RUN useradd trainer && mkdir -p /workspace && chown trainer: /workspace
ENV HOME=/tmp USER=trainer
USER trainer
WORKDIR /workspace
ENTRYPOINT ["pretrain_gpt"]
CMD ["--help"]
