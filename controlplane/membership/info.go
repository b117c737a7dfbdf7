package membership

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/yaml"
)

// ErrExpired says that a broker-info file may no longer be used to join.
var ErrExpired = errors.New("the broker-info file has expired")

// BrokerInfo is all that a cluster needs to join: where the broker is, and a credential of limited life
// that may register members and nothing else. deploy-broker writes it to a file, join reads it.
type BrokerInfo struct {
	Kind         string `json:"kind"` // BrokerInfo
	ClusterSetID string `json:"clusterSetID"`
	// Server is the URL of the broker's API server, CA its certificate authority (PEM); none means that
	// the system's are trusted.
	Server    string `json:"server"`
	CA        []byte `json:"ca,omitempty"`
	Namespace string `json:"namespace"`
	// Token is the credential, worthless after Expires.
	Token   string    `json:"token"`
	Expires time.Time `json:"expires"`
}

const brokerInfoKind = "BrokerInfo"

// ReadBrokerInfo reads the file at path. The error says what is wrong with it and where to get another.
func ReadBrokerInfo(path string) (BrokerInfo, error) {
	var b BrokerInfo
	text, err := os.ReadFile(path)
	if err != nil {
		return b, fmt.Errorf("read broker-info: %w; isthmusctl deploy-broker writes it", err)
	}
	if err := yaml.UnmarshalStrict(text, &b); err != nil {
		return b, fmt.Errorf("read broker-info %s: %w; isthmusctl deploy-broker writes such a file", path, err)
	}
	if b.Kind != brokerInfoKind || b.Server == "" || b.Namespace == "" || b.Token == "" {
		return b, fmt.Errorf("read broker-info %s: kind, server, namespace or token is missing; isthmusctl deploy-broker writes such a file", path)
	}
	return b, nil
}

// Write puts b into the file at path, readable by its owner alone, in one step: a reader sees the old
// file or the new one.
func (b BrokerInfo) Write(path string) error {
	text, err := yaml.Marshal(b)
	if err != nil {
		return fmt.Errorf("encode broker-info: %w", err)
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".broker-info-*") // mode 0600
	if err != nil {
		return fmt.Errorf("write broker-info: %w", err)
	}
	defer os.Remove(f.Name())
	_, errWrite := f.Write(text)
	if err := errors.Join(errWrite, f.Close(), os.Rename(f.Name(), path)); err != nil {
		return fmt.Errorf("write broker-info %s: %w", path, err)
	}
	return nil
}

// Check reports ErrExpired when b is of no use at now.
func (b BrokerInfo) Check(now time.Time) error {
	if now.After(b.Expires) {
		return fmt.Errorf("%w at %s; run isthmusctl deploy-broker again, it keeps all settings", ErrExpired, b.Expires.Format(time.RFC3339))
	}
	return nil
}

// RESTConfig says how to reach the broker with b's credential. It does not try to.
func (b BrokerInfo) RESTConfig() *rest.Config {
	return &rest.Config{Host: b.Server, BearerToken: b.Token, TLSClientConfig: rest.TLSClientConfig{CAData: b.CA}}
}

// kubeconfig is what a member's controller uses: the broker at b, the given token, and b's namespace.
func (b BrokerInfo) kubeconfig(token string) ([]byte, error) {
	const name = "broker"
	text, err := clientcmd.Write(clientcmdapi.Config{
		Clusters:       map[string]*clientcmdapi.Cluster{name: {Server: b.Server, CertificateAuthorityData: b.CA}},
		AuthInfos:      map[string]*clientcmdapi.AuthInfo{name: {Token: token}},
		Contexts:       map[string]*clientcmdapi.Context{name: {Cluster: name, AuthInfo: name, Namespace: b.Namespace}},
		CurrentContext: name,
	})
	if err != nil {
		return nil, fmt.Errorf("encode the kubeconfig for the broker: %w", err)
	}
	return text, nil
}
