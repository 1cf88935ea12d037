# corp on a CPU: docker build -t corp .   How to run it: docs/usage.md, "In a container".
FROM python:3.12-slim-bookworm AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
RUN python -m venv /opt/corp
# torch first: nearly all of the image is in this layer, which stays when corp changes. PyPI's has CUDA in it, so the
# small one for the CPU is taken from PyTorch's own index.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN /opt/corp/bin/pip install --index-url "${TORCH_INDEX}" "torch>=2.6" torchvision
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY configs configs
COPY corp_cli corp_cli
RUN /opt/corp/bin/pip install .

FROM python:3.12-slim-bookworm
RUN useradd --create-home --uid 1000 corp && install --directory --owner corp /work
COPY --from=build /opt/corp /opt/corp
# /work is the folder of outputs; what is fetched from the hub is kept there too, whoever --user says that runs it.
ENV PATH=/opt/corp/bin:$PATH HF_HOME=/work/.cache/huggingface PYTHONUNBUFFERED=1
USER 1000
WORKDIR /work
VOLUME ["/work", "/images"]
ENTRYPOINT ["corp"]
CMD ["--help"]
