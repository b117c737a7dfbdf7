package membership

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
)

// ErrExpired means that an invitation or a broker-info file has expired.
var ErrExpired = errors.New("the file has expired")

// BrokerInfo is the content of an invitation or of a broker-info file: the address of the broker, and a credential of limited
// life that may only register one cluster, or new clusters. invite and deploy-broker write such files, and join reads them.
type BrokerInfo struct {
	Kind         string `json:"kind"` // Invitation or BrokerInfo
	ClusterSetID string `json:"clusterSetID"`
	// ClusterID is the only cluster that may join with an invitation; empty in a broker-info file.
	ClusterID string `json:"clusterID,omitempty"`
	// The ClusterSet's settings at the time of writing, for people; join reads them from the broker.
	ClusterSetIPEnabled     *bool    `json:"clustersetIPEnabled,omitempty"`
	ClusterSetIPCIDRRange   []string `json:"clustersetIPCIDRRange,omitempty"`
	ClusterSetIPClusterSize int64    `json:"clustersetIPClusterSize,omitempty"`
	v1alpha1.Settings       `json:",inline"`
	// Server is the URL of the broker's API server, CA its certificate authority (PEM); empty means those of the system.
	Server    string `json:"server"`
	CA        []byte `json:"ca,omitempty"`
	Namespace string `json:"namespace"`
	// Token is the credential, valid until Expires.
	Token   string    `json:"token"`
	Expires time.Time `json:"expires"`
}

// The kinds of files with which clusters join.
const (
	brokerInfoKind = "BrokerInfo"
	invitationKind = "Invitation"
)

// ReadBrokerInfo reads the file at path. Its error names the fault and the remedy.
func ReadBrokerInfo(path string) (BrokerInfo, error) {
	var b BrokerInfo
	text, err := os.ReadFile(path)
	if err != nil {
		return b, fmt.Errorf("invitation %s cannot be read: %w; isthmusctl invite ID -o %s writes it", path, withoutPath(err), path)
	}
	object, err := yaml.YAMLToJSONStrict(text)
	var head struct{ Kind string }
	if err != nil || json.Unmarshal(object, &head) != nil || head.Kind != brokerInfoKind && head.Kind != invitationKind {
		return b, fmt.Errorf("%s is not an invitation but %s; isthmusctl invite ID -o FILE writes one", path, spellKind(head.Kind))
	}
	strict := json.NewDecoder(bytes.NewReader(object))
	strict.DisallowUnknownFields()
	const fix = "isthmusctl invite ID -o FILE writes a new one"
	if err := strict.Decode(&b); err != nil {
		return b, fmt.Errorf("%s is damaged, or of another version of isthmusctl: %s; %s", path, strings.TrimPrefix(err.Error(), "json: "), fix)
	}
	var missing []string
	for _, f := range []struct{ name, value string }{{"server", b.Server}, {"namespace", b.Namespace}, {"token", b.Token}} {
		if f.value == "" {
			missing = append(missing, f.name)
		}
	}
	if b.Kind == invitationKind && b.ClusterID == "" {
		missing = append(missing, "clusterID")
	}
	if len(missing) > 0 {
		return b, fmt.Errorf("%s is damaged: %s missing; %s", path, strings.Join(missing, ", "), fix)
	}
	return b, nil
}

// spellKind describes a file by its kind.
func spellKind(kind string) string {
	switch kind {
	case "":
		return "a file without a kind"
	case "Config":
		return "a kubeconfig"
	default:
		return "a manifest of kind " + kind
	}
}

// withoutPath returns the system's error without the name of the file, which the caller adds as the user gave it.
func withoutPath(err error) error {
	var path *fs.PathError
	var link *os.LinkError
	switch {
	case errors.As(err, &path):
		return path.Err
	case errors.As(err, &link):
		return link.Err
	}
	return err
}

// Write writes b to the file at path atomically, readable by its owner only.
func (b BrokerInfo) Write(path string) error {
	text, err := yaml.Marshal(b)
	if err != nil {
		return fmt.Errorf("encode the file for join: %w", err)
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".isthmus-join-*") // mode 0600
	if err == nil {
		defer os.Remove(f.Name())
		_, err = f.Write(text)
		err = cmp.Or(err, f.Close())
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return fmt.Errorf("%s cannot be written: %w; choose another path with --output", path, withoutPath(err))
	}
	return nil
}

// Check returns ErrExpired if b has expired at now.
func (b BrokerInfo) Check(now time.Time) error {
	if now.After(b.Expires) {
		return fmt.Errorf("%w at %s; run isthmusctl invite %s on the broker, which writes a new one", ErrExpired, b.Expires.Format(time.RFC3339), cmp.Or(b.ClusterID, "ID"))
	}
	return nil
}

// RESTConfig returns the client config for the broker with b's credential. It sends no request.
func (b BrokerInfo) RESTConfig() *rest.Config {
	return &rest.Config{Host: b.Server, BearerToken: b.Token, TLSClientConfig: rest.TLSClientConfig{CAData: b.CA}}
}

// kubeconfig returns the kubeconfig of a member's controller: the broker at b, b's namespace, and a token file beside it.
func (b BrokerInfo) kubeconfig() ([]byte, error) {
	const name = "broker"
	text, err := clientcmd.Write(clientcmdapi.Config{
		Clusters:       map[string]*clientcmdapi.Cluster{name: {Server: b.Server, CertificateAuthorityData: b.CA}},
		AuthInfos:      map[string]*clientcmdapi.AuthInfo{name: {TokenFile: v1alpha1.BrokerSecretToken}},
		Contexts:       map[string]*clientcmdapi.Context{name: {Cluster: name, AuthInfo: name, Namespace: b.Namespace}},
		CurrentContext: name,
	})
	if err != nil {
		return nil, fmt.Errorf("encode the kubeconfig for the broker: %w", err)
	}
	return text, nil
}
