"""The kinds of programs that every engine has, a file each; those of features are with these. See `ProgramKind`."""
