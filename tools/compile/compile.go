// Package compile runs the go command with the Makefile's settings. Programs, images, labs and benchmarks then share one build
// cache, and an executable has the same bytes in every checkout.
package compile

import (
	"context"
	"os"
	"os/exec"
	"strings"
)

// Flags are the Makefile's GOFLAGS. No debugger runs these programs, and compiling debug information
// (DWARF) is a fifth of a compiler's work.
const Flags = "-trimpath -buildvcs=false -gcflags=all=-dwarf=false"

// Go is the go command with arguments, for the caller to run. GOOS and the like can be added to its environment, and further flags to
// Flags in GOFLAGS, which a program hands on that compiles something itself.
func Go(ctx context.Context, args ...string) *exec.Cmd {
	flags := os.Getenv("GOFLAGS")
	if !strings.HasPrefix(flags, Flags) {
		flags = Flags
	}
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS="+flags, "GOWORK=off")
	return cmd
}
