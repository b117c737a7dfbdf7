package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/isthmus-net/isthmus/tools/process"
	"github.com/isthmus-net/isthmus/tools/testbed"
)

// question is a name that a pod of a cluster uses all the time.
type question struct {
	cluster, name string
	right         []string // clusters whose pods may answer

	cmd   *exec.Cmd
	out   strings.Builder
	over  bool  // it is no longer asked
	ended error // by itself, or not as it should
}

// questions are those of all clusters: Services of all of them, with and without an address, those of one, and one by its cluster.
func questions() []*question {
	var all []*question
	for _, c := range clusters {
		all = append(all, &question{cluster: c, name: "hello", right: clusters}, &question{cluster: c, name: "db", right: clusters})
		for _, other := range clusters {
			all = append(all,
				&question{cluster: c, name: "only-" + other, right: []string{other}},
				&question{cluster: c, name: other + ".hello", right: []string{other}})
		}
	}
	return all
}

// answers is the report of the echo client.
type answers struct {
	Connections, Failures     int
	Errors, Backends          map[string]int
	FirstFailure, LastFailure time.Time
}

// command returns the echo client in the cluster's pod. Each request looks the name up and makes a connection to what it finds.
func (q *question) command(ctx context.Context, tb *testbed.Testbed, args ...string) (*exec.Cmd, error) {
	return tb.ExecCommand(ctx, q.cluster, "shop", "client", slices.Concat([]string{"echo-server", "client", "--timeout", "3s"}, args, []string{"--url", "http://" + q.name + ".shop.svc.clusterset.local."})...)
}

// read returns the answers that a client printed.
func read(text string) (a answers, err error) {
	if err := json.Unmarshal([]byte(text), &a); err != nil {
		return a, fmt.Errorf("read what the client said, %q: %w", text, err)
	}
	return a, nil
}

// wrong returns how many answers were wrong, and in which way.
func (q *question) wrong(a answers) (n int, how []string) {
	n = a.Failures
	for _, text := range slices.Sorted(maps.Keys(a.Errors)) {
		how = append(how, fmt.Sprintf("%d times %s", a.Errors[text], text))
	}
	for _, backend := range slices.Sorted(maps.Keys(a.Backends)) {
		if of, _, _ := strings.Cut(backend, "/"); !slices.Contains(q.right, of) {
			n += a.Backends[backend]
			how = append(how, fmt.Sprintf("%d times the answer of %s", a.Backends[backend], backend))
		}
	}
	return n, how
}

// ask asks all questions ten times a second while steps run. An error says which answers were wrong.
func (m *migration) ask(ctx context.Context, steps func(context.Context) error) (err error) {
	all := questions()
	m.questions = all
	m.Step("wait until Lighthouse answers %d questions", len(all))
	for _, q := range all {
		if err := testbed.Eventually(ctx, patience, func(ctx context.Context) error { return q.once(ctx, m.Testbed) }); err != nil {
			return fmt.Errorf("before the migration: %w", err)
		}
	}
	m.Step("ask each of them ten times a second")
	for _, q := range all {
		if q.cmd, err = q.command(context.WithoutCancel(ctx), m.Testbed, "--duration", "1h", "--rate", "10"); err != nil {
			return err
		}
		q.cmd.Stdout = &q.out
		if err := q.cmd.Start(); err != nil {
			return err
		}
	}
	err = steps(ctx)
	m.Step("the questions end")
	asked, wrong := 0, 0
	for _, q := range all {
		if q.end(); q.ended != nil {
			err = errors.Join(err, fmt.Errorf("%s asks for %s: %w", q.cluster, q.name, q.ended))
			continue
		}
		a, readErr := read(q.out.String())
		err = errors.Join(err, readErr)
		n, how := q.wrong(a)
		asked, wrong = asked+a.Connections, wrong+n
		m.Step("%s asks for %s: %d questions, answered by %v", q.cluster, q.name, a.Connections, slices.Sorted(maps.Keys(a.Backends)))
		if n > 0 || a.Connections == 0 {
			err = errors.Join(err, fmt.Errorf("%s asks for %s: %d of %d answers are wrong, those without one from %s to %s:\n  %s", q.cluster, q.name, n, a.Connections,
				a.FirstFailure.Format(time.TimeOnly), a.LastFailure.Format(time.TimeOnly), strings.Join(how, "\n  ")))
		}
	}
	fmt.Fprintf(os.Stdout, "migration: %d questions, %d wrong answers\n", asked, wrong)
	return err
}

// end ends a question.
func (q *question) end() {
	if !q.over {
		q.over = true
		q.ended = errors.Join(q.cmd.Process.Signal(syscall.SIGTERM), q.cmd.Wait())
	}
}

// endNamesOfClusters ends the questions for names with a cluster.
func (m *migration) endNamesOfClusters() {
	for _, q := range m.questions {
		if strings.Contains(q.name, ".") {
			q.end()
		}
	}
}

// once asks a few times and returns what is wrong.
func (q *question) once(ctx context.Context, tb *testbed.Testbed) error {
	cmd, err := q.command(ctx, tb, "--connections", "5")
	if err != nil {
		return err
	}
	said, err := process.Output(cmd)
	if err != nil {
		return err
	}
	a, err := read(said)
	if n, how := q.wrong(a); err == nil && n > 0 {
		err = fmt.Errorf("%s asks for %s: %s", q.cluster, q.name, strings.Join(how, "; "))
	}
	return err
}
