package main

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/cmd/internal/version"
	"github.com/isthmus-net/isthmus/controlplane/broker/membership"
	gatewayv1alpha1 "github.com/isthmus-net/isthmus/gateway/api/v1alpha1"
)

// defaultTimeout bounds every request to an API server.
const defaultTimeout = 10 * time.Second

// target identifies the cluster of a command.
type target struct {
	kubeconfig string
	context    string
	timeout    time.Duration // of each request
	one        bool          // it is one of several clusters with different contexts
}

func (t *target) bind(f *pflag.FlagSet) {
	f.StringVar(&t.kubeconfig, "kubeconfig", "", "path of the cluster's kubeconfig (default: that of kubectl)")
	f.StringVar(&t.context, "context", "", "context of the kubeconfig (default: the current one)")
	t.timeout = defaultTimeout
}

// bindBroker is bind for the broker of a command that works on two clusters.
func (t *target) bindBroker(f *pflag.FlagSet) {
	f.StringVar(&t.kubeconfig, "broker-kubeconfig", "", "path of a kubeconfig with an administrator's access to the broker")
	f.StringVar(&t.context, "broker-context", "", "context of that kubeconfig, or of the cluster's own (default: the current one)")
}

// broker connects to the broker of a command that works on two clusters, of which member is the other one.
func (t *target) broker(cmd *cobra.Command, member target) (client.Client, error) {
	if t.kubeconfig == "" && t.context == "" {
		return nil, fmt.Errorf("no --broker-kubeconfig; %s works on the broker too, so give the path of an administrator's kubeconfig for it", cmd.Name())
	}
	other := *t
	other.timeout = member.timeout
	if other.kubeconfig == "" {
		other.kubeconfig = member.kubeconfig
	}
	return other.connect()
}

// helmFlags returns the flags of helm that name the cluster, each after a space.
func (t *target) helmFlags() string {
	flags := ""
	if t.kubeconfig != "" {
		flags += " --kubeconfig " + t.kubeconfig
	}
	if t.context != "" {
		flags += " --kube-context " + t.context
	}
	return flags
}

// connect reads the kubeconfig and returns a client for all kinds that isthmusctl knows.
func (t *target) connect() (client.Client, error) {
	cfg, _, err := t.config()
	if err != nil {
		return nil, err
	}
	return connect(cfg)
}

func (t *target) bindTimeout(f *pflag.FlagSet) {
	f.DurationVar(&t.timeout, "timeout", defaultTimeout, "timeout of a request to an API server")
}

// source describes the origin of the kubeconfig for messages.
func (t *target) source() string {
	if t.one {
		all := *t
		all.one = false
		return fmt.Sprintf("context %s of %s", t.context, all.source())
	}
	if t.kubeconfig != "" {
		return "kubeconfig " + t.kubeconfig
	}
	if env := os.Getenv(clientcmd.RecommendedConfigPathEnvVar); env != "" {
		return "kubeconfig " + env
	}
	return "kubeconfig " + clientcmd.RecommendedHomeFile
}

// config reads the kubeconfig and returns the client config of the cluster, and the namespace of its context.
func (t *target) config() (cfg *rest.Config, namespace string, err error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = t.kubeconfig
	loader := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &clientcmd.ConfigOverrides{CurrentContext: t.context})
	if raw, err := loader.RawConfig(); err == nil { // ClientConfig returns the same error
		if err := t.checkContext(raw); err != nil {
			return nil, "", err
		}
	}
	cfg, err = loader.ClientConfig()
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, "", fmt.Errorf("%s does not exist; give the path of one with --kubeconfig", t.source())
	case clientcmd.IsEmptyConfig(err):
		return nil, "", fmt.Errorf("%s names no cluster; give the path of another one with --kubeconfig", t.source())
	case err != nil:
		return nil, "", fmt.Errorf("%s cannot be used: %w", t.source(), err)
	}
	namespace, _, err = loader.Namespace()
	if err != nil {
		return nil, "", fmt.Errorf("%s cannot be used: %w", t.source(), err)
	}
	prepare(cfg, origin{address: t.source(), credentials: t.source(), fix: "use those of an administrator"}, t.timeout)
	return cfg, namespace, nil
}

// checkContext refuses a context that does not exist although others do.
func (t *target) checkContext(raw clientcmdapi.Config) error {
	name := cmp.Or(t.context, raw.CurrentContext)
	if len(raw.Contexts) == 0 || name == "" || raw.Contexts[name] != nil {
		return nil
	}
	others := strings.Join(slices.Sorted(maps.Keys(raw.Contexts)), ", ")
	if t.context != "" {
		return fmt.Errorf("%s has no context %q; it has %s", t.source(), name, others)
	}
	return fmt.Errorf("%s has no context %q, which it names as the current one; choose one of %s with --context", t.source(), name, others)
}

// checkURL returns the reason why the text of a flag is not the URL of an API server, or nil; "" is valid.
func checkURL(flag, text string) error {
	u, err := url.Parse(text)
	if text == "" || err == nil && (u.Scheme == "https" || u.Scheme == "http") && u.Hostname() != "" && u.RawQuery == "" && u.Fragment == "" {
		return nil
	}
	return fmt.Errorf("--%s: %q is not the URL of an API server, such as https://broker.example.org:6443", flag, text)
}

// prepare bounds requests through cfg and explains their failures.
func prepare(cfg *rest.Config, from origin, timeout time.Duration) {
	cfg.Timeout = timeout + time.Second // named's timeout fires first, because its error is better
	cfg.UserAgent = "isthmusctl/" + version.String()
	cfg.QPS, cfg.Burst = 50, 100
	cfg.WarningHandler = rest.NoWarnings{}
	cfg.ContentType = runtime.ContentTypeJSON // so that named can read refusals
	cfg.AcceptContentTypes = runtime.ContentTypeJSON
	cfg.Wrap(named(cfg.Host, from, timeout))
}

// connect returns a client for all kinds that isthmusctl knows.
func connect(cfg *rest.Config) (client.Client, error) {
	scheme, err := membership.NewScheme()
	if err != nil {
		return nil, err
	}
	if err := gatewayv1alpha1.AddToScheme(scheme); err != nil {
		return nil, fmt.Errorf("register API kinds: %w", err)
	}
	c, err := client.New(cfg, client.Options{Scheme: scheme})
	if err != nil {
		return nil, fmt.Errorf("make a client for %s: %w", cfg.Host, err)
	}
	return c, nil
}
