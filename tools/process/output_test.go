package process

import (
	"errors"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// A command that fails is named with what it said; one that succeeds may write to standard error.
func TestOutput(t *testing.T) {
	t.Parallel()
	run := func(script string) (string, error) {
		return Output(exec.CommandContext(t.Context(), "sh", "-c", script))
	}
	if out, err := run("echo result; echo warning >&2"); out != "result\n" || err != nil {
		t.Errorf("%q, %v", out, err)
	}
	for script, want := range map[string]string{"echo result; echo fault >&2; exit 3": "fault", "echo result; exit 3": "result"} {
		out, err := run(script)
		var failed *CommandError
		if out != "result\n" || !errors.As(err, &failed) || failed.Said != want || !slices.Equal(failed.Args, []string{"sh", "-c", script}) {
			t.Errorf("%s: %q, %v", script, out, err)
		}
		if exit := (*exec.ExitError)(nil); !errors.As(err, &exit) || exit.ExitCode() != 3 || !strings.HasSuffix(err.Error(), "exit status 3: "+want) {
			t.Errorf("%s: %v", script, err)
		}
	}
}
