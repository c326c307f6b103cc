"""`python -m anabranch`, which `torchrun -m anabranch` runs on every rank."""

from anabranch.cli import main

if __name__ == "__main__":
    main()
