package installation

import (
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// getter gives Helm the clients of one cluster, and nothing of other kubeconfigs. It keeps what it has discovered in memory.
type getter struct {
	cfg       *rest.Config
	namespace string
	cached    discovery.CachedDiscoveryInterface
}

func newGetter(cfg *rest.Config, namespace string) *getter {
	return &getter{cfg: cfg, namespace: namespace}
}

// ToRESTConfig is part of genericclioptions.RESTClientGetter.
func (g *getter) ToRESTConfig() (*rest.Config, error) { return rest.CopyConfig(g.cfg), nil }

// ToDiscoveryClient is part of genericclioptions.RESTClientGetter.
func (g *getter) ToDiscoveryClient() (discovery.CachedDiscoveryInterface, error) {
	if g.cached == nil {
		c, err := discovery.NewDiscoveryClientForConfig(g.cfg)
		if err != nil {
			return nil, err
		}
		g.cached = memory.NewMemCacheClient(c)
	}
	return g.cached, nil
}

// ToRESTMapper is part of genericclioptions.RESTClientGetter.
func (g *getter) ToRESTMapper() (meta.RESTMapper, error) {
	c, err := g.ToDiscoveryClient()
	if err != nil {
		return nil, err
	}
	return restmapper.NewDeferredDiscoveryRESTMapper(c), nil
}

// ToRawKubeConfigLoader is part of genericclioptions.RESTClientGetter. Helm reads the namespace from it.
func (g *getter) ToRawKubeConfigLoader() clientcmd.ClientConfig {
	config := clientcmdapi.NewConfig()
	config.Contexts["this"] = &clientcmdapi.Context{Namespace: g.namespace}
	config.CurrentContext = "this"
	return clientcmd.NewDefaultClientConfig(*config, &clientcmd.ConfigOverrides{})
}
