"""One engine or ecosystem each, on top of the cache. Each needs an extra; importing this package needs none."""
