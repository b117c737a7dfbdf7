// Package compile runs the go command with the Makefile's settings. Programs, images, labs and benchmarks then share one build
// cache, and an executable has the same bytes in every checkout.
package compile

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"
)

// Flags are the Makefile's GOFLAGS. No debugger runs these programs, and compiling debug information
// (DWARF) is a fifth of a compiler's work.
const Flags = "-trimpath -buildvcs=false -gcflags=all=-dwarf=false"

// Version is what a program states about its source.
type Version struct {
	Release string // such as v0.1.0; empty: the program calls itself "dev"
	Commit  string
	Date    time.Time // of the commit
}

// LinkerFlags returns the argument of `go build` that omits the symbol table and sets the version (package version).
func (v Version) LinkerFlags() string {
	flags := "-ldflags=-s -w"
	if v.Release == "" {
		return flags
	}
	for _, set := range [][2]string{{"release", v.Release}, {"commit", v.Commit}, {"date", v.Date.UTC().Format(time.RFC3339)}} {
		flags += fmt.Sprintf(" -X github.com/isthmus-net/isthmus/cmd/internal/version.%s=%s", set[0], set[1])
	}
	return flags
}

// Go is the go command with arguments, for the caller to run. GOOS and the like can be added to its environment, and further flags to
// Flags in GOFLAGS, which a program hands on that compiles something itself.
func Go(ctx context.Context, args ...string) *exec.Cmd {
	flags := os.Getenv("GOFLAGS")
	if !strings.HasPrefix(flags, Flags) {
		flags = Flags
	}
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS="+flags, "GOWORK=off", "GOAMD64=v1", "GOARM64=v8.0", "GOEXPERIMENT=")
	return cmd
}
