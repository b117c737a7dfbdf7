// Deps installs the named Debian packages if they are missing:
//
//	go run ./tools/deps clang-19 llvm-19
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"

	"github.com/isthmus-net/isthmus/tools/deps/debian"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	flag.Usage = func() {
		fmt.Fprint(flag.CommandLine.Output(), "usage: deps PACKAGE ...\nexample: go run ./tools/deps clang-19 llvm-19\n")
		flag.PrintDefaults()
	}
	flag.Parse()
	if err := debian.Ensure(ctx, os.Stderr, flag.Args()...); err != nil {
		fmt.Fprintln(os.Stderr, "deps:", err)
		stop()
		os.Exit(1)
	}
}
