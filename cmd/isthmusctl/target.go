package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/cmd/internal/version"
	"github.com/isthmus-net/isthmus/controlplane/membership"
)

// defaultTimeout bounds every request to an API server.
const defaultTimeout = 10 * time.Second

// target is the cluster a command works on.
type target struct {
	kubeconfig string
	context    string
	timeout    time.Duration // of each request
}

func (t *target) bind(f *pflag.FlagSet) {
	f.StringVar(&t.kubeconfig, "kubeconfig", "", "path of the cluster's kubeconfig (default: as kubectl finds it)")
	f.StringVar(&t.context, "context", "", "context of the kubeconfig (default: the current one)")
	t.timeout = defaultTimeout
}

func (t *target) bindTimeout(f *pflag.FlagSet) {
	f.DurationVar(&t.timeout, "timeout", defaultTimeout, "how long to wait for an answer of an API server")
}

// source is where the access comes from, as an operator would say it.
func (t *target) source() string {
	if t.kubeconfig != "" {
		return "kubeconfig " + t.kubeconfig
	}
	if env := os.Getenv(clientcmd.RecommendedConfigPathEnvVar); env != "" {
		return "kubeconfig " + env
	}
	return "kubeconfig " + clientcmd.RecommendedHomeFile
}

// config reads the kubeconfig and returns how to reach the cluster, and the namespace its context names.
func (t *target) config() (cfg *rest.Config, namespace string, err error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = t.kubeconfig
	loader := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &clientcmd.ConfigOverrides{CurrentContext: t.context})
	cfg, err = loader.ClientConfig()
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, "", fmt.Errorf("%s does not exist; give --kubeconfig the path of one", t.source())
	case clientcmd.IsEmptyConfig(err):
		return nil, "", fmt.Errorf("%s names no cluster; give --kubeconfig the path of one that does", t.source())
	case err != nil:
		return nil, "", fmt.Errorf("%s cannot be used: %w", t.source(), err)
	}
	namespace, _, err = loader.Namespace()
	if err != nil {
		return nil, "", fmt.Errorf("%s cannot be used: %w", t.source(), err)
	}
	prepare(cfg, t.source(), t.timeout)
	return cfg, namespace, nil
}

// prepare makes requests by cfg bounded, and their failures readable.
func prepare(cfg *rest.Config, source string, timeout time.Duration) {
	cfg.Timeout = timeout
	cfg.UserAgent = "isthmusctl/" + version.String()
	cfg.QPS, cfg.Burst = 50, 100
	cfg.WarningHandler = rest.NoWarnings{}
	cfg.Wrap(named(cfg.Host, source, timeout))
}

// connect returns a client for all kinds that isthmusctl knows.
func connect(cfg *rest.Config) (client.Client, error) {
	scheme, err := membership.NewScheme()
	if err != nil {
		return nil, err
	}
	c, err := client.New(cfg, client.Options{Scheme: scheme})
	if err != nil {
		return nil, fmt.Errorf("make a client for %s: %w", cfg.Host, err)
	}
	return c, nil
}
