package process

import (
	"bytes"
	"fmt"
	"os/exec"
	"strings"
)

// CommandError is the failure of a command that was run.
type CommandError struct {
	Args []string
	Err  error  // from os/exec
	Said string // what it wrote to standard error, or else to standard output
}

// Error names the command, how it ended and what it said.
func (e *CommandError) Error() string {
	return fmt.Sprintf("%s: %v: %s", strings.Join(e.Args, " "), e.Err, e.Said)
}

// Unwrap returns the error from os/exec.
func (e *CommandError) Unwrap() error { return e.Err }

// Output runs cmd to its end and returns its standard output. A command that fails is a *CommandError.
func Output(cmd *exec.Cmd) (string, error) {
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		said := strings.TrimSpace(stderr.String())
		if said == "" {
			said = strings.TrimSpace(stdout.String())
		}
		return stdout.String(), &CommandError{Args: cmd.Args, Err: err, Said: said}
	}
	return stdout.String(), nil
}
