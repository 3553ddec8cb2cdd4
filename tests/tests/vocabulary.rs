//! The vocabulary of the project: retired words do not come back.

use std::{fs, path::Path};

use build_tools::command::workspace;
use regex::Regex;

/// A line of `retired-words.txt`.
struct RetiredWord {
    pattern: Regex,
    replacement: String,
    /// Files that may use it.
    exceptions: Vec<String>,
}

fn retired_words(text: &str) -> Vec<RetiredWord> {
    let mut words = Vec::<RetiredWord>::new();
    for line in text.lines().filter(|it| !it.is_empty() && !it.starts_with('#')) {
        if let Some(exception) = line.strip_prefix("  except ") {
            let (file, reason) = exception.split_once(": ").expect("an exception has a reason");
            assert!(!reason.is_empty());
            words.last_mut().expect("an exception follows a word").exceptions.push(file.to_owned());
        } else {
            let (pattern, replacement) = line.split_once(" => ").expect("a word has a replacement");
            let pattern = Regex::new(pattern).expect("it is a regular expression");
            words.push(RetiredWord { pattern, replacement: replacement.to_owned(), exceptions: Vec::new() });
        }
    }
    words
}

/// Calls `check` with the path below `root` and the text of each text file.
fn each_text(root: &Path, folder: &Path, check: &mut impl FnMut(&str, &str)) {
    const SKIPPED: [&str; 6] = ["target", ".git", "corpus", "Cargo.lock", "LICENSE", "retired-words.txt"];
    for entry in fs::read_dir(folder).expect("the folder can be listed") {
        let path = entry.expect("the folder can be listed").path();
        if path.file_name().is_some_and(|it| SKIPPED.iter().any(|skipped| it == *skipped)) {
            continue;
        }
        if path.is_dir() {
            each_text(root, &path, check);
        } else if let Ok(text) = fs::read_to_string(&path) {
            let file = path.strip_prefix(root).expect("it is below the root");
            check(&file.to_string_lossy(), &text);
        }
    }
}

#[test]
fn no_retired_word_is_left() {
    let root = workspace();
    let words = retired_words(&fs::read_to_string(root.join("tests/retired-words.txt")).unwrap());
    let mut found = Vec::new();
    let mut files = 0;
    each_text(root, root, &mut |file, text| {
        files += 1;
        for word in words.iter().filter(|it| !it.exceptions.iter().any(|exception| exception == file)) {
            for (number, line) in (1..).zip(text.lines()) {
                if let Some(it) = word.pattern.find(line) {
                    found.push(format!("{file}:{number}: `{}`: write {}", it.as_str(), word.replacement));
                }
            }
        }
    });
    assert!(files > 400, "only {files} files were read");
    assert!(found.is_empty(), "{}", found.join("\n"));
}
