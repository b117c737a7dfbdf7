// Install follows README.md as a new user does: it runs the commands below "Install" in a folder with a release, on a lab of two clusters and a
// broker that have nothing of Isthmus yet, until curl answers.
//
//	go run ./e2e/install         # ends with "install: ok" and how long the commands took; a failing one says which and why
//	go run ./e2e/install down    # removes the lab
//
// The commands are those of the page, but for what is the lab's: names of registry and image, a registry without TLS, the folder of the
// programs, and "y" where a command asks. Each of the commands for a member is run for a and for b. Nothing reads the checkout meanwhile.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/isthmus-net/isthmus/tools/compile"
	"github.com/isthmus-net/isthmus/tools/documents"
	"github.com/isthmus-net/isthmus/tools/lab/cluster"
	"github.com/isthmus-net/isthmus/tools/process"
)

const (
	version = "v0.1.0" // that of the page
	// patience bounds a command, and the time until curl answers.
	patience = 3 * time.Minute
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	flag.Usage = func() {
		fmt.Fprint(flag.CommandLine.Output(), "usage: install [down]\nexample: go run ./e2e/install\n")
	}
	flag.Parse()
	lab, err := cluster.Open(cluster.Config{Name: "install", Topology: "a:1 b:1 broker:0", Progress: os.Stdout})
	switch {
	case err != nil:
	case flag.NArg() == 0:
		err = install(ctx, lab)
	case flag.NArg() == 1 && flag.Arg(0) == "down":
		err = lab.Down(ctx)
	default:
		err = fmt.Errorf("want no argument, or down, not %q; see --help", flag.Args())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "install: FAILED:", err)
		os.Exit(1)
	}
}

// install builds a release and a new lab, and runs the commands.
func install(ctx context.Context, lab *cluster.Lab) (err error) {
	commands, err := page("README.md")
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "isthmus-install-*")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	u := &user{lab: lab, release: filepath.Join(dir, "release"), programs: filepath.Join(dir, "bin")}
	if err := u.prepare(ctx); err != nil {
		return err
	}
	fmt.Fprintln(os.Stdout, "clusters stand, and the release is a folder")
	begin := time.Now()
	for _, c := range commands {
		if err := u.run(ctx, c); err != nil {
			return err
		}
	}
	if err := u.curl(ctx); err != nil {
		return err
	}
	fmt.Fprintf(os.Stdout, "install: ok, curl answers %.0f s after the first command\n", time.Since(begin).Seconds())
	return nil
}

// command is one command of the page.
type command struct {
	text   string
	member bool // it is for each member
}

// page returns the commands of the page, all but the last, which is run in a pod.
func page(path string) (all []command, err error) {
	blocks, err := documents.Read(path)
	if err != nil {
		return nil, err
	}
	member, last := false, ""
	for _, text := range documents.Commands(blocks, "Install") {
		for line := range strings.Lines(strings.ReplaceAll(text, "\\\n", "")) {
			line, comment, _ := strings.Cut(strings.TrimSpace(line), "# ")
			if line == "" {
				member = comment != "" && strings.HasPrefix(comment, "for each member") || comment == "" && member
				continue
			}
			all = append(all, command{strings.TrimSpace(line), member})
			last = line
		}
	}
	if !strings.HasPrefix(last, "curl ") {
		return nil, fmt.Errorf("the commands of %s end with %q, want a curl", path, last)
	}
	return all[:len(all)-1], nil
}

// user is who follows the page.
type user struct {
	lab      *cluster.Lab
	release  string // the folder in which the commands run
	programs string // in place of /usr/local/bin
	registry string
}

// prepare does what a user has done before: a release, two clusters, a broker and a registry are there, kubectl and Helm.
func (u *user) prepare(ctx context.Context) error {
	if err := errors.Join(u.lab.Down(ctx), os.MkdirAll(u.programs, 0o755)); err != nil {
		return err
	}
	for _, args := range [][]string{
		{"run", "./tools/release", "--version", version, "--platforms", "linux/" + runtime.GOARCH, "--images", "agent,controller,isthmusctl", "--unclean", "--output", u.release},
		{"build", "-C", "tools/helm", "-ldflags=-s -w", "-o", filepath.Join(u.programs, "helm"), "helm.sh/helm/v4/cmd/helm"},
	} {
		fmt.Fprintln(os.Stdout, "go", strings.Join(args, " "))
		if _, err := process.Output(compile.Go(ctx, args...)); err != nil {
			return err
		}
	}
	if err := u.lab.Up(ctx); err != nil {
		return err
	}
	var err error
	if u.registry, err = u.lab.StartRegistry(ctx); err != nil {
		return err
	}
	for _, name := range []string{"a", "b", "broker"} {
		config, err := os.ReadFile(u.lab.Kubeconfig(name))
		if err == nil {
			err = os.WriteFile(filepath.Join(u.release, name+".kubeconfig"), config, 0o600)
		}
		if err != nil {
			return err
		}
	}
	return os.Symlink(u.lab.KubectlPath(), filepath.Join(u.programs, "kubectl"))
}

// run runs a command, for both members if it is for each.
func (u *user) run(ctx context.Context, c command) error {
	text := strings.NewReplacer(
		"registry.example.org/team", u.registry, "/usr/local/bin/", u.programs+"/", "--image IMAGE", "--image "+cluster.TestImage,
		"images push", "images push --plain-http", "helm install", "helm install --plain-http",
	).Replace(c.text)
	if strings.Contains(c.text, "IMAGE") {
		text += " -- echo-server serve --http :80"
	}
	if err := u.shell(ctx, text); err != nil || !c.member {
		return err
	}
	return u.shell(ctx, strings.NewReplacer("invite a", "invite b", "invitation-a", "invitation-b", "a.kubeconfig", "b.kubeconfig").Replace(text))
}

// shell runs a command in the folder of the release, on a machine that reaches the clusters and the registry.
func (u *user) shell(ctx context.Context, text string) error {
	fmt.Fprintln(os.Stdout, "$", text)
	begin := time.Now()
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if _, err := process.Output(u.command(ctx, text)); err != nil {
		return err
	}
	fmt.Fprintf(os.Stdout, "  %.1f s\n", time.Since(begin).Seconds())
	return nil
}

func (u *user) command(ctx context.Context, text string) *exec.Cmd {
	cmd := u.lab.FabricCommand(ctx, "bash", "-euo", "pipefail", "-c", text)
	cmd.Dir = u.release
	cmd.Env = []string{"HOME=" + u.release, "PATH=" + u.programs + ":/usr/sbin:/usr/bin:/sbin:/bin"}
	cmd.Stdin = strings.NewReader("y\n")
	return cmd
}

// curl asks from a pod of a, until it gets an answer.
func (u *user) curl(ctx context.Context) error {
	if err := u.shell(ctx, "kubectl run client -n demo --image "+cluster.TestImage+" --kubeconfig a.kubeconfig -- sleep infinity && "+
		"kubectl wait pod/client -n demo --for condition=Ready --timeout 60s --kubeconfig a.kubeconfig"); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	const ask = "kubectl exec -n demo client --kubeconfig a.kubeconfig -- curl -sSm5 http://hello.demo.svc.clusterset.local"
	for {
		said, err := process.Output(u.command(ctx, ask))
		if err == nil {
			fmt.Fprintf(os.Stdout, "$ %s\n%s\n", ask, strings.TrimSpace(said))
			return nil
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(500 * time.Millisecond):
		}
	}
}
