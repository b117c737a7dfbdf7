// Hugepages runs a command while the kernel gives transparent huge pages to all programs, as Debian's kernels do by default, and restores
// the setting afterwards:
//
//	go run ./tools/hugepages go run ./e2e/demo
//
// Compilers and tests fault in much new memory. Where the host makes page faults slow and the kernel gives huge pages only to programs
// that ask for them (Go's do not), faults take up to half of a build. Without the right to change the setting, the command just runs.
package main

import (
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
	cmd := exec.Command(os.Args[1], os.Args[2:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	err := run(setting, cmd)
	if failed := (*exec.ExitError)(nil); errors.As(err, &failed) && failed.Exited() {
		os.Exit(failed.ExitCode())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "hugepages:", err)
		os.Exit(1)
	}
}

// run runs cmd with the setting of a file at "always", and then writes the former value. Nothing is written if that was the value, or
// if the file cannot be written.
func run(file string, cmd *exec.Cmd) error {
	// A terminal's interrupt also reaches cmd, which ends by it; the setting is restored then.
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	defer signal.Stop(signals)

	before := chosen(file)
	if before != "" && before != "always" && os.WriteFile(file, []byte("always"), 0o644) == nil {
		defer os.WriteFile(file, []byte(before), 0o644)
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	for {
		select {
		case err := <-ended:
			return err
		case s := <-signals:
			if s == syscall.SIGTERM {
				cmd.Process.Signal(s)
			}
		}
	}
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
