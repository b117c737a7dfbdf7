// Deps installs the named Debian packages if they are missing:
//
//	go run ./tools/deps clang-19 llvm-19
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"

	"github.com/isthmus-net/isthmus/tools/deps/debian"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := debian.Ensure(ctx, os.Stderr, os.Args[1:]...); err != nil {
		fmt.Fprintln(os.Stderr, "deps:", err)
		stop()
		os.Exit(1)
	}
}
