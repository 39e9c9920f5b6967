"""The measurements that this field started from, repeated in kind on the GPU at hand: docs/measured/seeds.md."""
