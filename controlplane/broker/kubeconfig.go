package broker

import (
	"errors"
	"fmt"
	"io/fs"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// LoadBroker reads the kubeconfig of the broker, and returns the namespace of its current context as the broker's
// namespace. It sends no request. Its errors name the file and the remedy.
func LoadBroker(path string) (*rest.Config, string, error) {
	const fix = "run isthmusctl join, which writes it into the Secret isthmus-broker"
	rules := &clientcmd.ClientConfigLoadingRules{ExplicitPath: path}
	loader := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, nil)
	raw, err := loader.RawConfig()
	if errors.Is(err, fs.ErrNotExist) {
		return nil, "", fmt.Errorf("broker kubeconfig %s does not exist; %s", path, fix)
	}
	if err != nil {
		return nil, "", fmt.Errorf("broker kubeconfig %s cannot be read; %s: %w", path, fix, err)
	}
	context, ok := raw.Contexts[raw.CurrentContext]
	if !ok || context.Namespace == "" {
		return nil, "", fmt.Errorf("broker kubeconfig %s: the current context %q names no namespace; %s", path, raw.CurrentContext, fix)
	}
	if cluster := raw.Clusters[context.Cluster]; cluster == nil || cluster.Server == "" {
		return nil, "", fmt.Errorf("broker kubeconfig %s: the current context %q names no server; %s", path, raw.CurrentContext, fix)
	}
	cfg, err := loader.ClientConfig()
	if err != nil {
		return nil, "", fmt.Errorf("broker kubeconfig %s is incomplete; %s: %w", path, fix, err)
	}
	return cfg, context.Namespace, nil
}
