//! Merge join of two sorted sequences.

use std::{cmp::Ordering, sync::Arc};

use itertools::{EitherOrBoth, Itertools};

/// Pairs the entries of two maps by key: each key once, with its value before and after.
///
/// Both sequences must be in ascending order of keys, each key once.
pub fn pairs<K: Ord, V>(
    before: impl IntoIterator<Item = (K, V)>,
    after: impl IntoIterator<Item = (K, V)>,
) -> impl Iterator<Item = (K, Option<V>, Option<V>)> {
    merge(before, after, |(a, _), (b, _)| a.cmp(b))
}

/// The entries of two maps that are not the same object in memory: key, value before, value after.
///
/// Both sequences must be in ascending order of keys, each key once.
pub fn differing<'a, K: Ord, V: 'a>(
    before: impl IntoIterator<Item = (K, &'a Arc<V>)>,
    after: impl IntoIterator<Item = (K, &'a Arc<V>)>,
) -> impl Iterator<Item = (K, Option<&'a Arc<V>>, Option<&'a Arc<V>>)> {
    // The same object has the same key: most keys need no comparison.
    let order = |a: &(K, &Arc<V>), b: &(K, &Arc<V>)| {
        if Arc::ptr_eq(a.1, b.1) { Ordering::Equal } else { a.0.cmp(&b.0) }
    };
    merge(before, after, order).filter(|(_, before, after)| match (before, after) {
        (Some(before), Some(after)) => !Arc::ptr_eq(before, after),
        _ => true,
    })
}

fn merge<K, V>(
    before: impl IntoIterator<Item = (K, V)>,
    after: impl IntoIterator<Item = (K, V)>,
    order: impl Fn(&(K, V), &(K, V)) -> Ordering,
) -> impl Iterator<Item = (K, Option<V>, Option<V>)> {
    before.into_iter().merge_join_by(after, order).map(|pair| match pair {
        EitherOrBoth::Left((key, before)) => (key, Some(before), None),
        EitherOrBoth::Right((key, after)) => (key, None, Some(after)),
        EitherOrBoth::Both((key, before), (_, after)) => (key, Some(before), Some(after)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_key_is_paired_once() {
        let found: Vec<_> = pairs([(1, 'a'), (2, 'b'), (4, 'd')], [(2, 'B'), (3, 'C'), (4, 'd')]).collect();
        let expect = [
            (1, Some('a'), None),
            (2, Some('b'), Some('B')),
            (3, None, Some('C')),
            (4, Some('d'), Some('d')),
        ];
        assert_eq!(found, expect);
    }

    #[test]
    fn what_is_the_same_object_does_not_differ() {
        let [a, b, c, d] = ["a", "b", "c", "d"].map(Arc::new);
        let copy = Arc::new("b");
        let (before, after) = ([(1, &a), (2, &b), (4, &d)], [(2, &copy), (3, &c), (4, &d)]);
        let expect = [(1, Some(&a), None), (2, Some(&b), Some(&copy)), (3, None, Some(&c))];
        assert_eq!(differing(before, after).collect::<Vec<_>>(), expect);
        assert_eq!(differing(after, after).count(), 0);
    }
}
