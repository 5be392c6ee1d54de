from support.fixtures import isa, one_thread, poison, seeded

__all__ = ["isa", "one_thread", "poison", "seeded"]
