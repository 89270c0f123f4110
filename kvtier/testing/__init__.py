"""What tests of kvtier, and of media and policies that others write, are made of."""
