package member

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
)

// ErrAnotherCluster is returned when the API server at the member's address belongs to another cluster.
var ErrAnotherCluster = errors.New("it is another cluster")

// errNotUnderstood is returned for an answer of another form than this version knows.
var errNotUnderstood = errors.New("the answer is not understood")

// identity is the identity of a cluster and its claims.
type identity struct {
	uid        string // of the namespace kube-system
	id         string // "" without a claim
	supervisor bool
	settings   Settings // of a supervisor
}

// statusError is a response with another status than 200.
type statusError struct {
	code int
	path string
}

func (e *statusError) Error() string {
	return fmt.Sprintf("GET %s: %d %s", e.path, e.code, http.StatusText(e.code))
}

// identify returns the identity of the cluster that send reaches.
func identify(ctx context.Context, send func(*http.Request) (*http.Response, error)) (identity, error) {
	var found identity
	var namespace metav1.PartialObjectMetadata
	if err := get(ctx, send, "/api/v1/namespaces/"+metav1.NamespaceSystem, &namespace); err != nil {
		return found, err
	}
	found.uid = string(namespace.UID)
	var claims federationv1alpha1.ClusterClaimList
	err := get(ctx, send, "/apis/"+federationv1alpha1.GroupVersion.String()+"/clusterclaims", &claims)
	var status *statusError
	if errors.As(err, &status) && status.code == http.StatusNotFound {
		return found, nil // the kind is not installed, so there is no claim
	}
	if err != nil {
		return found, err
	}
	for _, claim := range claims.Items {
		switch claim.Spec.Name {
		case federationv1alpha1.ClaimID:
			found.id = claim.Spec.Value
		case federationv1alpha1.ClaimSupervisor:
			found.supervisor = claim.Spec.Value == "true"
		}
	}
	if found.supervisor {
		found.settings, err = settings(ctx, send)
	}
	return found, err
}

// settings returns the settings of the supervisor that send reaches, unknown ones if it has no Federation.
func settings(ctx context.Context, send func(*http.Request) (*http.Response, error)) (Settings, error) {
	var federation federationv1alpha1.Federation
	err := get(ctx, send, "/apis/"+federationv1alpha1.GroupVersion.String()+"/federations/"+federationv1alpha1.FederationName, &federation)
	var status *statusError
	switch {
	case errors.As(err, &status): // a cluster that an earlier version formed grants no such right
		return Settings{Denied: status.code == http.StatusForbidden}, nil
	case errors.Is(err, errNotUnderstood): // it has another version
		return Settings{}, nil
	case err != nil:
		return Settings{}, err
	}
	return SettingsOf(federation.Spec), nil
}

// get decodes the JSON response of path into into.
func get(ctx context.Context, send func(*http.Request) (*http.Response, error), path string, into any) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://member"+path, http.NoBody)
	if err != nil {
		return err
	}
	req.Header.Set("Accept", "application/json")
	resp, err := send(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return &statusError{resp.StatusCode, path}
	}
	content, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(content, into); err != nil {
		return fmt.Errorf("%w: GET %s: %w", errNotUnderstood, path, err)
	}
	return nil
}

// explain returns the cause of err and the remedy, in a text that stays the same between two attempts.
func explain(err error, m federationv1alpha1.MemberCluster, namespace string) string {
	var status *statusError
	switch {
	case errors.Is(err, ErrAnotherCluster):
		return err.Error()
	case errors.Is(err, errNoTarget):
		return fmt.Sprintf("Secret %s/%s does not exist, or its %s or %s cannot be used; run isthmusctl federation rotate",
			namespace, m.Secret, federationv1alpha1.SecretToken, federationv1alpha1.SecretCA)
	case errors.As(err, &status) && status.code == http.StatusUnauthorized:
		return fmt.Sprintf("%s does not accept the token in Secret %s/%s, which may have expired; run isthmusctl federation rotate", m.Server, namespace, m.Secret)
	case errors.As(err, &status) && status.code == http.StatusForbidden:
		return fmt.Sprintf("%s does not let the account of Secret %s/%s read %s; run isthmusctl federation add again", m.Server, namespace, m.Secret, status.path)
	default:
		return fmt.Sprintf("%s does not answer; check spec.members[clusterID=%s].server of the Federation, and the network", m.Server, m.ClusterID)
	}
}
