// Generate writes all generated files of this repository, or those of the named steps:
//
//	go run ./tools/generate          # all steps
//	go run ./tools/generate chart    # one step
//	go run ./tools/generate -list    # a list of the steps
//
// The files are committed, so that users need only Go; `make check` proves that they are current.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"

	"github.com/isthmus-net/isthmus/tools/generate/gen"
)

func main() {
	list := flag.Bool("list", false, "list the steps with the files they write")
	root := flag.String("C", ".", "the repository's root")
	flag.Usage = func() {
		fmt.Fprint(flag.CommandLine.Output(), "usage: generate [-C DIR] [-list] [STEP ...]\nexample: go run ./tools/generate conformance\n")
		flag.PrintDefaults()
	}
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()

	if *list {
		for _, s := range gen.Steps {
			fmt.Fprintf(os.Stdout, "%-11s %s\n", s.Name, s.About)
		}
		return
	}
	if err := gen.Run(ctx, *root, os.Stderr, flag.Args()...); err != nil {
		fmt.Fprintln(os.Stderr, "generate:", err)
		stop()
		os.Exit(1)
	}
}
