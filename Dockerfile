FROM python:3.11-slim
COPY . /source
RUN pip install --no-cache-dir "/source[serve,fast]" && rm -rf /source \
    && useradd --create-home --uid 10001 featherbed
USER featherbed
ENV NUMBA_CACHE_DIR=/tmp/numba PYTHONUNBUFFERED=1
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/ready')"]
ENTRYPOINT ["featherbed", "serve", "--host", "0.0.0.0", "--watch"]
CMD ["/models/table.safetensors"]
