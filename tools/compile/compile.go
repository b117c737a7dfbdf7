// Package compile runs the go command the way the Makefile does, whoever is asked and however it was started: what programs,
// images, labs and benchmarks need is then in the build cache once, and an executable has the same bytes in every checkout.
package compile

import (
	"context"
	"os"
	"os/exec"
	"strings"
)

// Flags are the Makefile's GOFLAGS. Nobody steps through these programs in a debugger, and making what one needs for that
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
