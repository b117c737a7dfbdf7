package clusterset

import "time"

// PrecedenceWindow is how long after its creation an export may reach the broker and still count from its creation. It
// covers the restart of a controller and the difference of two clocks.
const PrecedenceWindow = 3 * time.Minute

// Claim is the evidence for the place of an export in the order of precedence.
type Claim struct {
	Exported   time.Time // the creation of the ServiceExport, by its member's own account; zero to ignore that
	Written    time.Time // when the broker first had the record, on the broker's clock
	Remembered time.Time // the place that this reader believed before the record was written again; zero without one
}

// Place returns the time from which an export of member id counts. The export counts from the creation of its ServiceExport
// if its record reached the broker within PrecedenceWindow of that, else from its first writing on the broker: a member
// cannot take precedence by an old date. A later creation always counts, so that an export that is created again loses its
// place.
//
// A broker that lost its objects gets all records again. Then the place counts that this reader remembers, but none before
// the creation that the record claims. No place is before the member joined.
func (r *MemberRegistry) Place(id ClusterID, c Claim) time.Time {
	place := c.Exported
	if c.Written.Sub(place) > PrecedenceWindow {
		place = c.Written
		if !c.Remembered.IsZero() && c.Remembered.Before(place) {
			place = c.Remembered
			if place.Before(c.Exported) {
				place = c.Exported
			}
		}
	}
	return r.ExportedAt(id, place)
}
