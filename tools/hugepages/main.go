// Hugepages runs a command while the kernel gives transparent huge pages to all programs, as Debian's kernels do by default, and restores
// the setting afterwards:
//
//	go run ./tools/hugepages go run ./e2e/demo
//
// Compilers and tests fault in much new memory. Where the host makes page faults slow and the kernel gives huge pages only to programs
// that ask for them (Go's do not), faults take up to half of a build. Without the right to change the setting, the command just runs.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"regexp"
	"syscall"
)

// setting is the kernel's file, such as "always [madvise] never" (Documentation/admin-guide/mm/transhuge.rst).
const setting = "/sys/kernel/mm/transparent_hugepage/enabled"

func main() {
	if len(os.Args) < 2 || os.Args[1] == "-h" || os.Args[1] == "--help" {
		fmt.Fprint(os.Stderr, "usage: hugepages COMMAND [ARGUMENT ...]\nexample: go run ./tools/hugepages go build ./...\n")
		os.Exit(2)
	}
	// A terminal's interrupt also reaches the command, which ends by it.
	signal.Notify(make(chan os.Signal, 1), os.Interrupt)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	cmd := exec.CommandContext(ctx, os.Args[1], os.Args[2:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	err := run(setting, cmd)
	stop()
	if failed := (*exec.ExitError)(nil); errors.As(err, &failed) && failed.Exited() {
		os.Exit(failed.ExitCode())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "hugepages:", err)
		os.Exit(1)
	}
}

// run runs cmd with the setting of a file at "always", and then writes the former value. Nothing is written if that was the value, or
// if the file cannot be written. When the context of cmd is done, cmd gets SIGTERM.
func run(file string, cmd *exec.Cmd) (err error) {
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	before := chosen(file)
	if before != "" && before != "always" && os.WriteFile(file, []byte("always"), 0o644) == nil {
		defer func() { err = errors.Join(err, os.WriteFile(file, []byte(before), 0o644)) }()
	}
	return cmd.Run()
}

var brackets = regexp.MustCompile(`\[(\w+)\]`)

// chosen returns the value in brackets, or "" if the kernel has no such setting.
func chosen(file string) string {
	text, err := os.ReadFile(file)
	if err != nil {
		return ""
	}
	if match := brackets.FindSubmatch(text); match != nil {
		return string(match[1])
	}
	return ""
}
