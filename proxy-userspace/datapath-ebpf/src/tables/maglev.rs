//! Which node owns each row of a frontend: a weighted Maglev table (Eisenbud et al., NSDI 2016). Pure.
//!
//! Every node that a packet can enter by computes the same owners: they depend on the nodes' names and numbers of endpoints
//! alone. A node that comes or goes moves little more than its own share of the rows.
//! Maglev has a prime number of rows; here it is a power of two, so that a row is selected by a mask, and that a larger table
//! repeats a smaller one: the owner before of row r is that of row r modulo the size before. A node visits all rows because its
//! step is odd.

use model::state::{NodeShare, forwarding_rows};
use twox_hash::XxHash64;

/// The position in `nodes` of the owner of each row; no rows for no nodes. The nodes are in ascending order, each once.
pub fn owners(nodes: &[NodeShare]) -> Vec<u16> {
    /// No owner yet.
    const FREE: u16 = u16::MAX;
    let Some(most) = nodes.iter().map(|it| u64::from(it.endpoints)).max() else { return Vec::new() };
    let size = forwarding_rows(nodes.len());
    let mask = size - 1;
    let mut candidates: Vec<_> = nodes.iter().map(Candidate::new).collect();
    let mut owners = vec![FREE; size as usize];
    let mut left = size;
    loop {
        // A node has a turn in as many rounds as its weight says.
        for (index, it) in (0..).zip(&mut candidates) {
            it.credit += it.weight;
            if it.credit < most {
                continue;
            }
            it.credit -= most;
            let owner = loop {
                let owner = &mut owners[(it.next & mask) as usize];
                it.next = it.next.wrapping_add(it.step);
                if *owner == FREE {
                    break owner;
                }
            };
            *owner = index;
            left -= 1;
            if left == 0 {
                return owners;
            }
        }
    }
}

/// A node, and which row it asks for next.
struct Candidate {
    next: u32,
    step: u32,
    weight: u64,
    credit: u64,
}

impl Candidate {
    fn new(share: &NodeShare) -> Self {
        let hash = XxHash64::oneshot(0, share.node.as_bytes());
        Self { next: hash as u32, step: (hash >> 32) as u32 | 1, weight: share.endpoints.into(), credit: 0 }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn shares(endpoints: &[u32]) -> Vec<NodeShare> {
        let share = |(n, endpoints): (usize, &u32)| NodeShare {
            node: format!("node-{n:04}.example").into(),
            endpoints: *endpoints,
        };
        endpoints.iter().enumerate().map(share).collect()
    }

    /// How many rows each of `nodes` owns.
    fn rows(nodes: &[NodeShare]) -> Vec<usize> {
        let mut rows = vec![0; nodes.len()];
        owners(nodes).into_iter().for_each(|it| rows[usize::from(it)] += 1);
        rows
    }

    #[test]
    fn no_node_owns_nothing() {
        assert_eq!(owners(&[]), Vec::<u16>::new());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn each_node_owns_its_share(endpoints in prop::collection::vec(1_u32..5, 1..100)) {
            let nodes = shares(&endpoints);
            let all: u32 = endpoints.iter().sum();
            for (rows, endpoints) in rows(&nodes).into_iter().zip(&endpoints) {
                let share = f64::from(forwarding_rows(nodes.len())) * f64::from(*endpoints) / f64::from(all);
                // A round more or less.
                prop_assert!((rows as f64 - share).abs() <= 1.0 + share * 0.02, "{rows} rows of {share}");
            }
        }

        #[test]
        fn a_node_that_goes_moves_little_more_than_its_share(count in 3_usize..70, which: prop::sample::Index) {
            let nodes = shares(&vec![1; count]);
            let gone = which.index(count);
            let left: Vec<_> = nodes.iter().enumerate().filter(|(n, _)| *n != gone).map(|(_, it)| it.clone()).collect();
            prop_assume!(forwarding_rows(nodes.len()) == forwarding_rows(left.len()));
            let (before, now) = (owners(&nodes), owners(&left));
            let name = |nodes: &[NodeShare], it: u16| nodes[usize::from(it)].node.clone();
            let moved = before.iter().zip(&now).filter(|(a, b)| name(&nodes, **a) != name(&left, **b)).count();
            let share = before.len() as f64 / count as f64;
            prop_assert!(moved as f64 <= share * 1.3, "{moved} rows moved of a share of {share}");
        }
    }
}
