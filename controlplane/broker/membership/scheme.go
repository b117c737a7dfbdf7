package membership

import (
	"errors"
	"fmt"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	mcsv1beta1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/about"
	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
)

// NewScheme returns a scheme with the kinds that this package and federation/bootstrap need, so that one client serves both.
func NewScheme() (*runtime.Scheme, error) {
	s := runtime.NewScheme()
	err := errors.Join(clientgoscheme.AddToScheme(s), apiextensionsv1.AddToScheme(s),
		v1alpha1.AddToScheme(s), federationv1alpha1.AddToScheme(s), about.AddToScheme(s), mcsv1beta1.Install(s))
	if err != nil {
		return nil, fmt.Errorf("register API kinds: %w", err)
	}
	return s, nil
}
