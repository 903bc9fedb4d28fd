"""Writers of the generated tables in docs/: `python -m scripts.docs.flags`, run from the checkout."""
