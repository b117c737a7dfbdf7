package reference

// The flags are those of bpf/gen.go.
//
//go:generate go tool -modfile=../../../../lint/go.mod bpf2go -go-package reference -target bpfel,bpfeb -cc clang-19 -strip llvm-strip-19 -cflags "-O2 -g -Wall -Wextra -Werror -mcpu=v3 -nostdlibinc -I../../../../../bpf/include -fdebug-prefix-map=$PWD=." reference reference.bpf.c
