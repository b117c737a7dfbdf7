package main

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/isthmus-net/isthmus/tools/await"
)

// A command runs with huge pages for all programs, and the kernel's setting is as before when it has ended, however it ended.
func TestRun(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ before, script, during, after string }{
		"on request":  {"always [madvise] never", "cat $FILE", "always", "madvise"},
		"never":       {"always madvise [never]", "cat $FILE", "always", "never"},
		"already":     {"[always] madvise never", "cat $FILE", "[always] madvise never", "[always] madvise never"},
		"failure":     {"always [madvise] never", "cat $FILE; exit 3", "always", "madvise"},
		"no setting":  {"", "echo runs", "runs\n", ""},
		"other words": {"nothing", "cat $FILE", "nothing", "nothing"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			file := filepath.Join(t.TempDir(), "enabled")
			if c.before != "" {
				if err := os.WriteFile(file, []byte(c.before), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			cmd := exec.CommandContext(t.Context(), "sh", "-c", c.script)
			cmd.Env = append(os.Environ(), "FILE="+file)
			output := filepath.Join(t.TempDir(), "output")
			stdout, err := os.Create(output)
			if err != nil {
				t.Fatal(err)
			}
			defer stdout.Close()
			cmd.Stdout = stdout
			err = run(file, cmd)
			if failed := (*exec.ExitError)(nil); (name == "failure") != (errors.As(err, &failed) && failed.ExitCode() == 3) {
				t.Errorf("ended with %v", err)
			}
			during, err := os.ReadFile(output)
			if err != nil || string(during) != c.during {
				t.Errorf("while the command ran: %q, %v; want %q", during, err, c.during)
			}
			if after, err := os.ReadFile(file); string(after) != c.after {
				t.Errorf("afterwards: %q, %v; want %q", after, err, c.after)
			}
		})
	}
}

// SIGTERM ends the command, and the setting is restored.
func TestTerminated(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "enabled")
	if err := os.WriteFile(file, []byte("always [madvise] never"), 0o644); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	started := filepath.Join(t.TempDir(), "started")
	cmd := exec.CommandContext(ctx, "sh", "-c", "touch "+started+"; exec sleep 60")
	ended := make(chan error, 1)
	go func() { ended <- run(file, cmd) }()
	await.NoError(t, "the command runs", func() error {
		_, err := os.Stat(started)
		return err
	})
	if during, err := os.ReadFile(file); string(during) != "always" {
		t.Errorf("while the command ran: %q, %v", during, err)
	}
	stop()
	if err := <-ended; err == nil || err.Error() != "signal: terminated" {
		t.Errorf("ended with %v", err)
	}
	if after, err := os.ReadFile(file); string(after) != "madvise" {
		t.Errorf("afterwards: %q, %v", after, err)
	}
}

// A command that does not exist is an error, and the setting is restored.
func TestNoCommand(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "enabled")
	if err := os.WriteFile(file, []byte("always [madvise] never"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := run(file, exec.CommandContext(t.Context(), "/nowhere/command")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%v", err)
	}
	if after, err := os.ReadFile(file); string(after) != "madvise" {
		t.Errorf("afterwards: %q, %v", after, err)
	}
}
