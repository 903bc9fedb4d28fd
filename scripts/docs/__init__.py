"""Writers of the generated tables in docs/, for example `python -m scripts.docs.flags`."""
