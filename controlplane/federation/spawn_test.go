package federation_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"

	"k8s.io/client-go/rest"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// spawnedPod is the environment variable that turns this program into a supervisor process.
const spawnedPod = "ISTHMUS_TEST_SUPERVISOR"

// local is the standard input of a spawned process: the configuration of an administrator of its own API server.
type local struct {
	Host  string
	CA    []byte
	Token string
}

// spawn runs a supervisor as a separate process and returns a function that kills it. It ends with the test at the latest.
func (w *testbed) spawn(id clusterset.ClusterID, pod string) (kill func()) {
	w.t.Helper()
	program, err := os.Executable()
	if err != nil {
		w.t.Fatal(err)
	}
	cmd := exec.Command(program)
	cmd.Env = append(os.Environ(), spawnedPod+"="+pod)
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		w.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		w.t.Fatal(err)
	}
	kill = func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
	w.t.Cleanup(kill)
	c := servers[id].Config(w.t)
	if err := json.NewEncoder(stdin).Encode(local{c.Host, c.CAData, c.BearerToken}); err != nil {
		w.t.Fatal(err)
	}
	return kill
}

// spawned runs the supervisor process until its standard input ends.
func spawned(pod string) {
	var c local
	if err := json.NewDecoder(os.Stdin).Decode(&c); err != nil {
		fmt.Fprintln(os.Stderr, "spawned supervisor:", err)
		return
	}
	ctx, end := context.WithCancel(context.Background())
	go func() {
		defer end()
		_, _ = io.Copy(io.Discard, os.Stdin)
	}()
	f, err := newFederation(&rest.Config{Host: c.Host, TLSClientConfig: rest.TLSClientConfig{CAData: c.CA}, BearerToken: c.Token}, pod, slog.New(slog.DiscardHandler))
	if err == nil {
		err = f.Run(ctx)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "spawned supervisor:", err)
	}
}
