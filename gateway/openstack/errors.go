package openstack

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	"github.com/gophercloud/gophercloud/v2"
)

// What Neutron's refusals mean. Every other error is of a cloud that does not answer as it should, and may pass.
var (
	// ErrGone: there is no such object, or it is of another project, which Neutron does not tell apart.
	ErrGone = errors.New("no such object in this project")
	// ErrQuota: the project may have no more of these.
	ErrQuota = errors.New("the project's quota is exhausted")
	// ErrStale: somebody changed the object since it was read.
	ErrStale = errors.New("the object was changed meanwhile")
	// ErrTaken: an address, or the place for a floating IP, is in use.
	ErrTaken = errors.New("it is in use")
	// ErrPairs: the port may have no more allowed address pairs.
	ErrPairs = errors.New("the port may have no more allowed address pairs (Neutron's max_allowed_address_pair)")
	// ErrForbidden: the credentials do not allow it, and asking again will not help.
	ErrForbidden = errors.New("the credentials do not allow it")
	// ErrInvalid: Neutron does not understand the request, or not in this network.
	ErrInvalid = errors.New("refused as invalid")
)

// byType are the errors whose status code says less than their type: a quota that is exhausted is a conflict as well.
var byType = map[string]error{
	"OverQuota":                            ErrQuota,
	"AllowedAddressPairExhausted":          ErrPairs,
	"IpAddressAlreadyAllocated":            ErrTaken,
	"IpAddressGenerationFailure":           ErrQuota, // the subnet has no address left
	"ExternalIpAddressExhausted":           ErrQuota,
	"FloatingIPPortAlreadyAssociated":      ErrTaken,
	"RevisionNumberConstraintFailed":       ErrStale,
	"NetworkNotFound":                      ErrGone,
	"ExternalGatewayForFloatingIPNotFound": ErrInvalid, // no router joins the port's subnet with the floating network
}

var byStatus = map[int]error{
	http.StatusBadRequest:         ErrInvalid,
	http.StatusUnauthorized:       ErrForbidden, // after a new token: an access rule, or a credential that was withdrawn
	http.StatusForbidden:          ErrForbidden,
	http.StatusNotFound:           ErrGone,
	http.StatusConflict:           ErrTaken,
	http.StatusPreconditionFailed: ErrStale,
}

// explain puts an error of ours before what the cloud says.
func explain(err error) error {
	var refused gophercloud.ErrUnexpectedResponseCode
	if !errors.As(err, &refused) {
		return err
	}
	kind, text := neutronError(refused.Body)
	meaning, ok := byType[kind]
	if !ok {
		meaning, ok = byStatus[refused.Actual]
	}
	if text == "" {
		text = http.StatusText(refused.Actual)
	}
	if !ok {
		return fmt.Errorf("status %d: %s", refused.Actual, text)
	}
	return fmt.Errorf("%w: %s", meaning, text)
}

// neutronError returns the type and the text of an answer that is an error.
func neutronError(body []byte) (kind, text string) {
	var neutron struct {
		NeutronError struct{ Type, Message, Detail string }
		Error        struct{ Title, Message string } // Keystone's
	}
	if json.Unmarshal(body, &neutron) != nil {
		return "", ""
	}
	if neutron.Error.Message != "" {
		return neutron.Error.Title, neutron.Error.Message
	}
	return neutron.NeutronError.Type, neutron.NeutronError.Message
}
